"""The script of the start-up comparison: one step of a tiny model, then the time on the clock."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def main() -> None:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run = unisono.Run(model, optimizer, shards=8, seed=0)
    for step in run.steps(dataset, batch_size=16, steps=1):
        with step:
            for inputs, targets in step.shards:
                step.backward(F.cross_entropy(model(inputs), targets))
        print("first step done at", time.time(), flush=True)


if __name__ == "__main__":
    main()
