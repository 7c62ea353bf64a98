"""Trains in the directory that is the first argument, and fails as the second says: in rank 1."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

DIRECTORY, WAY = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
rank = unisono.world().rank
is_bad = rank == unisono.world().world_size - 1


def loss(model, batch):
    if is_bad and WAY == "raise" and 9 in batch[1]:
        raise KeyError("bad sample")
    if is_bad and WAY == "kill" and 9 in batch[1]:
        os.kill(os.getpid(), 9)
    return model(batch[0]).sum() * (float("nan") if WAY == "nan" and 9 in batch[1] else 1)


def main():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, seed=0, directory=DIRECTORY)
    data = TensorDataset(torch.ones(12, 2), torch.arange(12))
    trainer.fit(data, batch_size=4, epochs=1, shuffle=False)
    if WAY == "after" and is_bad:
        raise KeyError("after training")
    if WAY == "interrupt":
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
