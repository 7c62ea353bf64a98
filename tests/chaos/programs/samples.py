"""The datasets and samplers of random programs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tests.chaos.programs.blocks import LENGTH, NUM_CLASSES, NUM_TOKENS, SIDE, WIDTH
from tests.chaos.programs.choices import Choices
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

_DRAWN = {
    "none": lambda: 0.0,
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
    "all": lambda: random.gauss(0, 0.2) + float(np.random.randn() + torch.randn(())) * 0.1,
}


def tensors(kind: str, num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "tokens":
        inputs = torch.randint(0, NUM_TOKENS, (num_samples, LENGTH), generator=generator)
        return inputs, inputs[:, 0].clone()
    shape = (WIDTH,) if kind == "vectors" else (2, SIDE, SIDE)
    inputs = torch.randn(num_samples, *shape, generator=generator)
    return inputs, inputs.flatten(1)[:, :NUM_CLASSES].argmax(1)


class Items(Dataset):
    """Gives one sample after the other, each augmented."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, draws: str) -> None:
        self.inputs, self.labels, self.draws = inputs, labels, draws

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = _DRAWN[self.draws]()
        if self.inputs.dtype == torch.int64:
            return self.inputs[index].roll(int(drawn * 3)), self.labels[index]
        return self.inputs[index] + 0.1 * drawn, self.labels[index]


class ManyAtOnce(Items):
    """Gives what is asked for at once, with one draw for all."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        drawn = _DRAWN[self.draws]()
        samples = [(self.inputs[index], self.labels[index]) for index in indices]
        if self.inputs.dtype == torch.int64:
            return [(inputs.roll(int(drawn * 3)), label) for inputs, label in samples]
        return [(inputs * (1 + 0.1 * drawn), label) for inputs, label in samples]


class Stream(IterableDataset):
    """Gives all samples in their order, another one each epoch."""

    def __init__(self, items: Items) -> None:
        self.items, self.epoch = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.items)):
            yield self.items[(index * 7 + self.epoch) % len(self.items)]


class Parts(Stream):
    """Gives each shard its own part."""

    def shard(self, index: int, num_shards: int) -> Iterator[Any]:
        part = range(index, len(self.items), num_shards)
        return (self.items[(place + self.epoch) % len(self.items)] for place in part)


def collate(samples: list[Any]) -> Any:
    """Collate, and draw: small noise on inputs that are not tokens."""
    inputs, labels = default_collate(samples)
    return (inputs if inputs.dtype == torch.int64 else inputs + 0.01 * random.random()), labels


def dataset_of(choices: Choices, num_samples: int, seed: int) -> Any:
    """Make a dataset."""
    inputs, labels = tensors(choices.kind, num_samples, seed)
    items = Items(inputs, labels, choices.draws)
    match choices.dataset:
        case "tensors":
            return TensorDataset(inputs, labels)
        case "subset":
            more = tensors(choices.kind, num_samples + 3, seed)
            return Subset(TensorDataset(*more), range(num_samples + 2, 2, -1))
        case "list":
            return list(zip(inputs, labels, strict=True))
        case "many at once":
            return ManyAtOnce(inputs, labels, choices.draws)
        case "stream":
            return Stream(items)
        case "parts":
            return Parts(items)
    return items


class CutAnew:
    """Batches of other sizes in each epoch, as many as there would be of one size. Final."""

    def __init__(self, num_samples: int, num_batches: int) -> None:
        self._num_samples, self._num_batches = num_samples, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._num_samples).tolist()
        between = torch.randperm(self._num_samples - 1)[: self._num_batches - 1] + 1
        ends = [0, *sorted(between.tolist()), self._num_samples]
        yield from (order[begin:end] for begin, end in itertools.pairwise(ends))


def sampler_of(choices: Choices) -> Any:
    """Make a sampler; None: the run's own order."""
    num_samples = choices.num_samples

    def by_hand(epoch: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + 3 * epoch)
        return torch.randint(num_samples, (num_samples,), generator=generator)

    weights = [1.0 + index % 3 for index in range(num_samples)]
    match choices.sampler:
        case "in order":
            return SequentialSampler(range(num_samples))
        case "function":
            return by_hand
        case "weighted":
            return WeightedRandomSampler(weights, num_samples)
        case "with replacement":
            return RandomSampler(range(num_samples), replacement=True, num_samples=num_samples)
    return None
