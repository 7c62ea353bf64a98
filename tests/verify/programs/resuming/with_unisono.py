"""A program of ours with a directory: it resumes in the middle of an epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


torch.manual_seed(0)
x = torch.randn(96, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
trainer = unisono.Trainer(model, optimizer, loss, shards=4, seed=0, directory="run", checkpoint=2)
trainer.fit(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16, epochs=3)
