"""Train a small classifier on handwritten digits, resuming from its newest checkpoint.

The program that the files of this folder start. It says nothing of hosts or workers; the digest
that it prints in the end is the same on any number of them.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="of checkpoints: a folder that all hosts see, or a URL")
    parser.add_argument("--shards", type=int, default=8, help="at least as many as workers")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    # A host that is lost costs what was computed since the newest checkpoint.
    every = "1min" if args.directory else None
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=args.shards, directory=args.directory, checkpoint=every
    )
    trainer.fit(digits(), batch_size=64, epochs=args.epochs)


if __name__ == "__main__":
    main()
