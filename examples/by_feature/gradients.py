"""Look at gradients and change them, between their sum and the update: clip by layer, add noise."""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def clip_by_layer(step, gradients):
    """Called on every worker with the same mean gradients of the global batch."""
    norms = {name: gradient.norm().item() for name, gradient in gradients.items()}
    for name, gradient in gradients.items():
        gradient.mul_(min(1.0, 0.5 / (norms[name] + 1e-6)))
        gradient.add_(torch.randn_like(gradient), alpha=1e-3)  # generators are seeded for it
    if step % 50 == 0 and unisono.world().rank == 0:
        largest = max(norms, key=norms.get)
        print(f"step {step}: the largest gradient is that of {largest}, {norms[largest]:.3f}")


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, on_gradients=clip_by_layer)
    trainer.fit(digits(), batch_size=64, epochs=5, validate=digits(train=False))


if __name__ == "__main__":
    main()
