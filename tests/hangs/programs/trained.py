"""A program that trains with Unisono and gets stuck: how is the first argument."""

import itertools
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unisono

sys.path.insert(0, os.path.dirname(__file__))
import ways

WAY = sys.argv[1]
RANK, PID = int(os.environ.get("RANK", 0)), os.getpid()
LATE = int(os.environ.get("WORLD_SIZE", 1)) - 1


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return load_image(index)


# More than what is read to compare datasets before the first step. When they are used up depends
# on how many are read twice, and that on the time, so this trains for many epochs.
first_ones = itertools.repeat(None, 60)


def load_image(index):
    is_later = next(first_ones, "later") is not None
    if RANK == LATE and is_later and WAY in ways.WAYS and (WAY != "lock" or os.getpid() != PID):
        ways.WAYS[WAY](index)
    return torch.full((4,), float(index)), torch.zeros(1)


def loss(model, batch):
    images, labels = batch
    return nn.functional.mse_loss(model(images), labels)


def main():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    directory = sys.argv[3] if len(sys.argv) > 3 else None
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, seed=0, directory=directory)
    loaders = 1 if WAY == "lock" else 0
    if WAY == "lock" and RANK == LATE:
        ways.LOCK.acquire()
    trainer.fit(DataLoader(Images(), 8, shuffle=True, num_workers=loaders), epochs=100)
    trainer.evaluate(Images(), batch_size=8)


if __name__ == "__main__":
    main()
