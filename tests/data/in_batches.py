"""Batch samplers of the kinds that people write, and a program that trains with them."""

import random

import torch
from tests.data import augmenting
from tests.data.augmenting import Noisy
from tests.replacements import wait_for_replacement
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

import unisono
from unisono.runtime.workers.context import context

N = augmenting.NUM_SAMPLES
LENGTHS = [1 + 7 * index % 11 for index in range(N)]
BUDGET = 30


class Tokens(Sampler):
    """Batches of so many tokens at most; their number differs from epoch to epoch."""

    def __iter__(self):
        batch, used = [], 0
        for index in torch.randperm(N).tolist():
            if batch and used + LENGTHS[index] > BUDGET:
                yield batch
                batch, used = [], 0
            batch.append(index)
            used += LENGTHS[index]
        yield batch


class Buckets(Sampler):
    """Batches of like lengths, in an order of its own generator; says how many there are."""

    def __init__(self):
        by_length = sorted(range(N), key=LENGTHS.__getitem__)
        self.batches = [by_length[at : at + 9] for at in range(0, N, 9)]
        self.generator = random.Random(3)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.generator.sample(self.batches, len(self.batches)))


class Growing(Sampler):
    """Batches that grow from epoch to epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(N).split(4 + 3 * self.epoch))


def poisson(epoch, seed):
    """Each sample with a probability of its own, as DP-SGD takes them."""
    generator = torch.Generator().manual_seed(seed + 1000 * epoch)
    taken = [torch.where(torch.rand(N, generator=generator) < 0.2)[0] for _ in range(5)]
    return [indices.tolist() for indices in taken if len(indices)]


def endless(epoch, seed):
    """Batches without end."""
    generator = random.Random(seed)
    while True:
        yield generator.sample(range(N), generator.randrange(1, 12))


class OwnBatches(BatchSampler):
    """One that is torch's but for its class."""


KINDS = {
    "tokens": Tokens,
    "buckets": Buckets,
    "growing": Growing,
    "poisson": lambda: poisson,
    "endless": lambda: endless,
    "a list": lambda: [list(range(at, min(at + 1 + at % 5, N))) for at in range(0, N, 6)],
    "torch's": lambda: OwnBatches(RandomSampler(range(N)), 10, drop_last=True),
}


def loader_with(kind, loader_workers=0, dataset=None):
    data = Noisy() if dataset is None else dataset
    return DataLoader(data, batch_sampler=KINDS[kind](), num_workers=loader_workers)


class Patient(unisono.callbacks.Callback):
    """Waits where a worker is lost, so that a replacement joins while there is more to come."""

    joined = None

    def on_step_begin(self, fit):
        if self.joined is None and fit.has_joined:
            self.joined = fit.step
        wait_for_replacement(context().team())


def train(kind, loader_workers=0, *, steps=27, callbacks=(), **options):
    """Train and validate in this worker; returns all that must be the same anywhere."""
    torch.manual_seed(0)
    # Without BatchNorm, as a shard may have a single sample.
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = unisono.Trainer(
        model, optimizer, augmenting.loss_of, shards=3, callbacks=callbacks, **options
    )
    history = trainer.fit(
        loader_with(kind, loader_workers),
        steps=steps,
        validate=DataLoader(Noisy(), batch_sampler=Tokens()),
        validate_every=9,
    )
    return [history.digest, history.samples, history.validation, list(history)]


def train_all(cases):
    return [train(*case) for case in cases]


def train_patiently(kind, loader_workers=0, **options):
    patient = Patient()
    found = train(kind, loader_workers, callbacks=[patient], **options)
    return found, patient.joined
