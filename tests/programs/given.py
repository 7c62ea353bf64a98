"""What each program of the catalogue begins with: data, small nets, and a place for its result.

A program is a script, ``from tests.programs.given import *`` and then what its user wrote, within
``with found(globals()):``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from tests.programs import watching
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unisono
from unisono.callbacks import Callback

__all__ = [
    "DIR",
    "LOADERS",
    "SGD",
    "STEPS",
    "Adam",
    "Callback",
    "DataLoader",
    "Dataset",
    "F",
    "Rows",
    "TensorDataset",
    "X",
    "Y",
    "data",
    "fit",
    "found",
    "loss",
    "net",
    "nn",
    "torch",
    "trainer",
    "unisono",
]

STEPS = 24  # four epochs of six
DIR = os.environ.get("PROGRAM_DIRECTORY") or None
LOADERS = int(os.environ.get("PROGRAM_LOADERS", 0))
X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
data = TensorDataset(X, Y)
torch.manual_seed(0)


class Rows(Dataset):
    """Rows and labels, each row as `change` makes it."""

    def change(self, row: torch.Tensor, index: int) -> torch.Tensor:
        return row

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return self.change(X[index], index), Y[index]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trainer(model: nn.Module, loss: Any = loss, optimizer: Any = None, **options: Any) -> Any:
    """Make a trainer as a user would."""
    optimizer = optimizer or SGD(model.parameters(), lr=0.1, momentum=0.9)
    return unisono.Trainer(model, optimizer, loss, **{"shards": 6, "directory": DIR, **options})


def fit(trainer: Any, data: Any = data, collate: Any = None, **options: Any) -> Any:
    """Train four epochs, with loader processes where they are wanted."""
    if LOADERS or collate:
        options["batch_size"] = None
        given = {"collate_fn": collate, "num_workers": LOADERS}
        data = DataLoader(data, 16, shuffle=options.pop("shuffle", True), **given)
    return trainer.fit(data, **{"batch_size": 16, "epochs": 4, **options})


@contextmanager
def found(names: dict[str, Any]) -> Iterator[None]:
    """Note what comes of a program: the digests of its runs, or what it raised."""
    said: dict[str, Any] = {}
    try:
        yield
        runs = (unisono.Run, unisono.Trainer)
        said["digests"] = {n: one.digest() for n, one in names.items() if isinstance(one, runs)}
        said["result"] = names.get("result")
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        said["cpu_s"] = time.process_time() - watching.BEGAN_S
        watching.note(json.dumps(said))


watching.begin()
