"""Train the classic convolutional network on MNIST, on any number of workers.

    unisono run -n 2 examples/mnist.py --data FOLDER --directory runs/mnist
    unisono top runs/mnist          # in another terminal
    unisono report runs/mnist       # afterwards

FOLDER holds the four original files (train-images-idx3-ubyte, …), packed with gzip or not;
`--download` fetches those that are not there.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import mnist


class Net(nn.Sequential):
    """Two convolutions, pooled twice, and two linear layers: 421,642 parameters."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def main():
    parser = argparse.ArgumentParser(description="Train a CNN on MNIST.")
    parser.add_argument("--data", required=True, metavar="FOLDER", help="where the IDX files are")
    parser.add_argument("--download", action="store_true", help="fetch files that are missing")
    parser.add_argument("--directory", help="for checkpoints and the event file; runs go on there")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of one optimizer step")
    args = parser.parse_args()

    torch.manual_seed(0)
    train_set = mnist(args.data, download=args.download)
    test_set = mnist(args.data, train=False, download=args.download)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, seed=0, directory=args.directory)
    trainer.fit(train_set, batch_size=args.batch_size, epochs=args.epochs, validate=test_set)


if __name__ == "__main__":
    main()
