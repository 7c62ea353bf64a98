"""A program of ours: the trainer, with dropout and batch norm."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def main():
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, seed=0)
    trainer.fit(data, batch_size=16, epochs=3)


if __name__ == "__main__":
    main()
