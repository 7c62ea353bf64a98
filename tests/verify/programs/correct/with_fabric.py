"""Lightning Fabric: loaders, model and optimizer are set up, loss and counts put together."""

import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_sets():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(110, 8, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return TensorDataset(x[:80], y[:80]), TensorDataset(x[80:], y[80:])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(20, 2)

    def forward(self, x):
        return self.head(self.net(x))


def main():
    world_size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(3)
    train_set, test_set = make_sets()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=8)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    fabric.seed_everything(3 + fabric.global_rank)
    for epoch in range(2):
        model.train()
        for number, (x, y) in enumerate(train_loader):
            is_accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(F.cross_entropy(model(x), y) / 2)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_loader:
                right += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
        right = fabric.all_reduce(right, reduce_op="sum")
        fabric.print("epoch", epoch, "accuracy", (right[0] / right[1]).item())


if __name__ == "__main__":
    main()
