"""Accelerate: everything prepared, accumulation, clipping, a schedule, metrics gathered."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(112, 8, generator=generator)
    y = (x.sum(1) > 0).long()
    train_set = TensorDataset(x[:96], y[:96])
    test_set = TensorDataset(x[96:], y[96:])
    return (
        DataLoader(train_set, shuffle=True, batch_size=batch_size),
        DataLoader(test_set, batch_size=batch_size),
    )


def training_function(config):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(config["seed"])
    train_loader, eval_loader = get_dataloaders(config["batch_size"])
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    num_steps = EPOCHS * len(train_loader)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )
    for epoch in range(EPOCHS):
        model.train()
        for x, y in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for x, y in eval_loader:
            with torch.no_grad():
                predictions = model(x).argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, y))
            right.append((predictions == references).float())
        accelerator.print(f"epoch {epoch}:", torch.cat(right).mean().item())


if __name__ == "__main__":
    training_function({"lr": 1e-2, "seed": 42, "batch_size": 8})
