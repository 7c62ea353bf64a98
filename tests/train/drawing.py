"""Programs whose data set, collate function, loss or model have generators of their own."""

import functools
import random

import numpy as np
import torch
import torch.nn.functional as F
from tests.classified import at_random
from tests.loaders import loader_of
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

import unisono

GLOBAL = np.random.default_rng(5)


class Jitter:
    __slots__ = ("draw", "rng")

    def __init__(self):
        self.rng = random.Random(0)
        self.draw = self.rng.random  # a bound method alone would do

    def __call__(self, inputs):
        return inputs + self.draw()


class Own(Dataset):
    """Draws as numpy's own pages recommend, in a transform, and of a generator of the class."""

    scale = torch.Generator()

    def __init__(self):
        self.inputs, self.labels = at_random(22, 8, 4, seed=3).tensors
        self.rng = np.random.default_rng(0)
        self.steps = {"jitter": [Jitter()]}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        inputs = self.inputs[index] * float(self.rng.random())
        for transform in self.steps["jitter"]:
            inputs = transform(inputs)
        return inputs * torch.rand((), generator=self.scale), self.labels[index]


class Lazy(Own):
    """Makes its generator when it is first read."""

    def __init__(self):
        super().__init__()
        self.rng = None

    def __getitem__(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng()
        return super().__getitem__(index)


class Legacy(Own):
    """Takes many at once, with generators of older kinds and a global one."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.RandomState(3)

    def __getitems__(self, indices):
        shift = GLOBAL.normal() + self.rng.rand()
        return [(self.inputs[index] + shift, self.labels[index]) for index in indices]


class Stream(IterableDataset):
    def __init__(self):
        self.data, self.rng = Own(), np.random.Generator(np.random.Philox(2))

    def __len__(self):
        return 22

    def __iter__(self):
        for index in range(22):
            inputs, label = self.data[index]
            yield inputs + float(self.rng.normal()), label


def collating():
    generator = torch.Generator().manual_seed(1)

    def collate(generator_of, samples):
        inputs, labels = zip(*samples, strict=True)
        noise = torch.randn(8, generator=generator) + float(generator_of["it"].random())
        return torch.stack(inputs) + noise, torch.stack(labels)

    return functools.partial(collate, {"it": random.Random(9)})


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng()

    def forward(self, inputs):
        return inputs + float(self.rng.normal())


def losing():
    generator = torch.Generator().manual_seed(7)

    def loss(model, batch):
        inputs = batch[0] + 0.1 * torch.randn(batch[0].shape, generator=generator)
        return F.cross_entropy(model(inputs), batch[1]) * GLOBAL.uniform(0.5, 1.5)

    return loss


def hooked(layer):
    """Have hooks of a layer and of its weight draw; they have other numbers in each process."""
    rng, generator = np.random.default_rng(4), torch.Generator()

    def noisy(grad):
        return grad + torch.randn(grad.shape, generator=generator).to(grad.device)

    layer.weight.register_hook(noisy)
    layer.register_forward_hook(lambda module, inputs, outputs: outputs + float(rng.normal()))


class Shuffled:
    def __init__(self):
        self.rng = random.Random(2)

    def __call__(self, model, batch):
        return self.weighted(F.cross_entropy(model(batch[0]), batch[1]))

    def weighted(self, loss):
        return loss * (1 + self.rng.random())


PROGRAMS = {
    "data set": lambda: (Own(), {}, None),
    "read ahead": lambda: (Own(), {"num_workers": 2, "collate_fn": collating()}, None),
    "collate": lambda: (at_random(22, 8, 4, seed=3), {"collate_fn": collating()}, None),
    "parts": lambda: (Subset(ConcatDataset([Own(), Legacy()]), range(5, 35)), {}, None),
    "many": lambda: (Legacy(), {}, None),
    "lazy": lambda: (Lazy(), {"num_workers": 1}, None),
    "stream": lambda: (Stream(), {}, None),
    "loss": lambda: (Own(), {}, losing()),
    "object": lambda: (at_random(22, 8, 4, seed=3), {}, Shuffled().__call__),
}


def train(name, *, steps=7, **options):
    dataset, reading, loss = PROGRAMS[name]()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), Noisy(), nn.Dropout(0.3), nn.Linear(6, 4))
    hooked(model.to(options.get("device", "cpu"))[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = unisono.Trainer(model, optimizer, loss or plain, shards=4, seed=1, **options)
    loader = loader_of(dataset, 6, **reading)
    trainer.fit(loader, steps=steps)
    rows, means = trainer.predict(loader), trainer.evaluate(loader)
    return trainer.digest(), means, rows.tolist()


def plain(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def own_loop(named):
    """A loop of one's own that draws in its body, or in a function that it calls."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=4, seed=1)
    rng, generator = np.random.default_rng(3), torch.Generator()

    def noisy(inputs):
        return inputs + torch.randn(inputs.shape, generator=generator)

    for step in run.steps(at_random(22, 8, 4, seed=3), batch_size=6, steps=7):
        with step:
            for inputs, labels in step.shards:
                drawn = noisy(inputs) if named else inputs * rng.uniform()
                step.backward(F.cross_entropy(model(drawn), labels))
    return run.digest()
