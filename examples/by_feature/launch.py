"""Start workers from Python, as in a notebook: no command, one result from each worker.

python examples/by_feature/launch.py --workers 2
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


def train(lr):
    """Run on every worker; what it returns comes back to the caller."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    summary = trainer.fit(digits(), batch_size=64, epochs=3, validate=digits(train=False))
    return summary.validation["loss"], model.state_dict()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    workers = parser.parse_args().workers

    for lr in (1e-3, 1e-2):  # the second call starts at once: the fork server stays
        results = unisono.launch(train, lr, workers=workers)
        value, weights = results[0]
        print(f"lr {lr}: {len(results)} results, validation loss {value:.4f}, {list(weights)}")


if __name__ == "__main__":
    main()
