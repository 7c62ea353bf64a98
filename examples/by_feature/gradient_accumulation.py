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
    return {"loss": F.cross_entropy(model(images), labels), "passes": 1}  # counts are added up


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=16)
    summary = trainer.fit(digits(), batch_size=256, epochs=5)
    if unisono.world().rank == 0:
        print(f"{summary.means['passes']:.0f} passes a step, of at most {256 // 16} samples")


if __name__ == "__main__":
    main()
