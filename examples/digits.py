"""Train a small CNN on scikit-learn's handwritten digits, in seconds, on any number of workers.

    python examples/digits.py
    unisono run -n 2 examples/digits.py

Both print the same digest: the weights agree bit for bit.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono


class Net(nn.Sequential):
    """Two normalised convolutions and two linear layers on 8 × 8 pixels."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def digits():
    """Split the 1,797 images: every fifth is for the test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    is_test = torch.arange(len(images)) % 5 == 0
    return (
        TensorDataset(images[~is_test], labels[~is_test]),
        TensorDataset(images[is_test], labels[is_test]),
    )


def main():
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = unisono.Trainer(model, optimizer, loss, seed=0)
    trainer.fit(train_set, batch_size=32, epochs=6, validate=test_set)
    result = trainer.evaluate(test_set, batch_size=32)
    if unisono.world().rank == 0:
        print(f"test accuracy {result['accuracy']:.2%}")


if __name__ == "__main__":
    main()
