"""Train on a stream that does not say how many samples it has, for a number of steps."""

import itertools

import torch
from torch import nn
from torch.utils.data import IterableDataset

import unisono


class Noisy(IterableDataset):
    """Points of a parabola, without an end."""

    def __iter__(self):
        return self.shard(0, 1)

    def shard(self, index, num_shards):
        """Give every `num_shards`-th sample, from `index` on, without making the others."""
        for number in itertools.count(index, num_shards):
            x = torch.tensor([(number * 0.618) % 2.0 - 1.0])
            yield x, x**2 + 0.05 * torch.randn(1)  # generators are seeded for each sample


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    trainer.fit(Noisy(), batch_size=64, steps=100)


if __name__ == "__main__":
    main()
