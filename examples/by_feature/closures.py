"""Train with optimizers that ask for the loss again: `closures.py sam`, or `closures.py lbfgs`."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


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
    return F.cross_entropy(model(images), labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("optimizer", nargs="?", choices=OPTIMIZERS, default="sam")
    name = parser.parse_args().optimizer
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # A `step` that requires a closure is called with one.
    trainer = unisono.Trainer(model, OPTIMIZERS[name](model.parameters()), loss, shards=4)
    trainer.fit(digits(), batch_size=256, epochs=5, validate=digits(train=False))


if __name__ == "__main__":
    main()
