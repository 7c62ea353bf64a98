"""Accumulate gradients: a batch of 256 in 16 shards, each of them one forward and backward pass.

More shards than workers *is* gradient accumulation: memory holds the graph of one shard of 16
samples at a time, on any number of workers up to 16. Nothing in the loss depends on it.
"""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    largest.append(len(images))
    return F.cross_entropy(model(images), labels)


largest = []  # on this worker


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=16)
    summary = trainer.fit(digits(), batch_size=256, epochs=5)
    if unisono.world().rank == 0:
        passes = len(largest) / summary.steps
        print(f"{passes:.1f} passes a step on worker 0, of at most {max(largest)} samples")


if __name__ == "__main__":
    main()
