"""Train a model on several devices in one process, with the bits of one device.

    python examples/by_feature/several_devices.py --devices cuda:0 cuda:1
    python examples/by_feature/several_devices.py --devices cpu cpu cpu    # without a GPU
    unisono run -n 2 examples/by_feature/several_devices.py --devices cuda cuda

The last command starts two workers with two GPUs each.

What `torch.nn.DataParallel` is often used for: no launcher, one process, also in a notebook. The
digest at the end is the same for any number of devices and workers of one kind.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def loss(model, batch):
    """Compute with the `model` that is given: each device has its own."""
    inputs, labels = batch
    outputs = model(inputs)
    hits = (outputs.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(outputs, labels), "accuracy": hits}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--devices", nargs="+", default=["cpu", "cpu"], help="such as cuda:0 cuda:1"
    )
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 20, generator=draw)
    labels = (inputs @ torch.randn(20, 3, generator=draw)).argmax(1)

    torch.manual_seed(0)
    model = nn.Sequential(  # with layers that people ask about: statistics, dropout
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # `shards` decides the bits and is at least the number of devices of all workers.
    trainer = unisono.Trainer(model, optimizer, loss, shards=8, devices=args.devices)
    trainer.fit(TensorDataset(inputs, labels), batch_size=64, epochs=args.epochs)


if __name__ == "__main__":
    main()
