"""Datasets that draw random numbers, and a program that trains on them; run in workers."""

import random

import numpy as np
import torch
from tests.classified import cross_entropy as loss_of
from tests.loaders import loader_of
from torch import nn
from torch.utils.data import Dataset

import unisono

NUM_SAMPLES = 47
BATCH_SIZE = 10
EPOCHS = 3

DRAWS = {
    "python": lambda: random.random(),
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


class Noisy(Dataset):
    """Adds to each sample what one of the generators says."""

    def __init__(self, kind="torch"):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
        self.labels = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
        self.kind = kind

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return self.inputs[index] + DRAWS[self.kind](), self.labels[index]


class Drawing(Noisy):
    """Gives the index, and a number of each generator."""

    def __getitem__(self, index):
        return index, random.getrandbits(62), np.random.randint(2**62), torch.randint(2**62, ())


class NoisyMany(Noisy):
    """The same for many samples at once, with a number for all of them."""

    def __getitems__(self, indices):
        draw = DRAWS[self.kind]()
        return [(self.inputs[index] + draw, self.labels[index]) for index in indices]


class Model(nn.Sequential):
    """Draws random numbers too."""

    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))


def make(shards=3, **options):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return unisono.Trainer(model, optimizer, loss_of, shards=shards, **options)


def noisy_collate(samples):
    inputs, labels = zip(*samples, strict=True)
    return torch.stack(inputs) + random.random(), torch.stack(labels)


def train(dataset, loader_workers, collate_fn=None, *, totals=None, **options):
    """Train and validate in this worker; returns the digest and the mean of the validation."""
    trainer = make(**options)
    loader = loader_of(dataset, BATCH_SIZE, num_workers=loader_workers, collate_fn=collate_fn)
    summary = trainer.fit(loader, **(totals or {"epochs": EPOCHS}), validate=dataset)
    return summary.digest, summary.validation["loss"]


def train_all(cases):
    """Train with each case of (dataset, loader_workers, collate_fn) in this worker."""
    return [train(*case) for case in cases]


def draw_all(loader_workers):
    """Go through two epochs; gives (epoch, index, a number of each generator) of each sample."""
    trainer = make()
    parameter = next(trainer.run.model.parameters())
    seen = []
    loader = loader_of(Drawing(), BATCH_SIZE, num_workers=loader_workers)
    for step in trainer.run.steps(loader, epochs=2):
        with step:
            for batch in step.shards:
                columns = [column.tolist() for column in batch]
                seen += [(step.epoch, *row) for row in zip(*columns, strict=True)]
                step.backward(parameter.sum())
    return seen


def train_and_draw(cases):
    """All that :func:`train_all` and :func:`draw_all` do, without and with loader processes."""
    return train_all(cases), [draw_all(loader_workers) for loader_workers in (0, 2)]
