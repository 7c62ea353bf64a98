"""Stop a run in the midst of an epoch and resume it: the result is that of a run without a stop.

Or stop it yourself, with Ctrl-C, and start it again on another number of workers:

    unisono run -n 2 examples/by_feature/checkpoints.py --directory runs/stopped --epochs 2000
    python examples/by_feature/checkpoints.py --directory runs/stopped --epochs 2000
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(directory, epochs, steps=None):
    """Start as a program does: with a new model, a new optimizer and a new trainer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # There is a checkpoint at the end; `checkpoint=` asks for more on the way.
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, directory=directory)
    trainer.fit(digits(), batch_size=32, epochs=epochs, steps=steps)
    return trainer.digest()


def main(folder):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", help="train and resume here: a folder, or a URL")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    if args.directory:
        train(args.directory, args.epochs)
        return
    train(folder, args.epochs, steps=70)  # 25 steps into the second epoch
    resumed = train(folder, args.epochs)
    undisturbed = train(None, args.epochs)
    if unisono.world().rank == 0:
        print("the same bits" if resumed == undisturbed else "OTHER BITS")


if __name__ == "__main__":
    # If workers pass different directories, all take rank 0's.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        main(folder)
