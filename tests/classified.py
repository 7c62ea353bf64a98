"""What most tests train on: random rows in classes, and losses of models that tell these apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def by_sign(num_samples: int = 20, num_features: int = 4, seed: int | None = None) -> TensorDataset:
    """Make rows of two classes, told by the sign of their sum; the seed is their number if None."""
    generator = torch.Generator().manual_seed(num_samples if seed is None else seed)
    rows = torch.randn(num_samples, num_features, generator=generator)
    return TensorDataset(rows, (rows.sum(1) > 0).long())


def at_random(num_samples: int, num_features: int, num_classes: int, seed: int) -> TensorDataset:
    """Make rows whose classes nothing tells."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_samples, num_features, generator=generator)
    return TensorDataset(rows, torch.randint(num_classes, (num_samples,), generator=generator))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def with_accuracy(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    inputs, labels = batch
    outputs = model(inputs)
    hits = (outputs.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(outputs, labels), "accuracy": hits}


def taken(run: Any, loss: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Any]:
    """Take all steps of a loop of the program's own; gives each when it is done."""
    for step in run.steps(*args, **options):
        with step:
            for batch in step.shards:
                step.backward(loss(run.model, batch))
        yield step
