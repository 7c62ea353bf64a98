"""Hold a data set in memory once, not once per worker; each worker says how much memory it takes.

    unisono run -n 4 bench/shared_data.py
    unisono run -n 4 bench/shared_data.py --own

With `--own` each worker makes the data set for itself. Both give the same digest.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def make(mebibytes):
    """Stands for what reads files and decodes them."""
    inputs = torch.randn(mebibytes * 2**20 // 256, 64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def memory_bytes():
    """Read what this process takes; of pages that several map, its share (PSS)."""
    with open("/proc/self/smaps_rollup") as file:
        (line,) = (line for line in file if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--mebibytes", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)

    torch.manual_seed(1)
    before = memory_bytes()
    data = make(args.mebibytes) if args.own else unisono.share(lambda: make(args.mebibytes))
    trainer.fit(data, batch_size=8192, epochs=1)

    trainer.evaluate(data, batch_size=8192)  # all have read all of it
    taken = memory_bytes() - before
    trainer.evaluate(data, batch_size=8192)  # nobody ends before all have looked
    world = unisono.world()
    print(f"worker {world.rank} of {world.world_size} takes {taken / 2**20:.0f} MiB more")


if __name__ == "__main__":
    main()
