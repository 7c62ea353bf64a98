"""Train with optimizers that ask for the loss again.

python examples/by_feature/closures.py lbfgs
python examples/by_feature/closures.py sam
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation (Foret et al. 2021) around SGD."""

    def __init__(self, params, rho, **options):
        super().__init__(params, **options)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in moved]).norm()
        before = [p.clone() for p in moved]
        for p in moved:
            p.add_(p.grad * (self.rho / (norm + 1e-12)))
        closure()  # the gradient there
        for p, old in zip(moved, before, strict=True):
            p.copy_(old)
        super().step()
        return loss


OPTIMIZERS = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.2, max_iter=4),
    "sam": lambda parameters: SAM(parameters, rho=0.05, lr=0.1, momentum=0.9),
}


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "sam"
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # A `step` that cannot be called without a closure is given one; `closure=True` is for others.
    trainer = unisono.Trainer(model, OPTIMIZERS[name](model.parameters()), loss, shards=4)
    trainer.fit(data, batch_size=256, epochs=5, validate=data)


if __name__ == "__main__":
    main()
