"""What each program of the catalogue begins with: data, small nets, and a place for its result.

A program is a script, ``from tests.programs.given import *`` and then what its user wrote, within
``with found(globals()):``.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import random
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.chaos.exchanges import install
from tests.programs import watching
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import unisono
from unisono.callbacks import Callback

__all__ = [
    "DEVICE", "DIR", "EPOCHS", "LOADERS", "SGD", "STEPS", "Adam", "Between", "Callback",
    "DataLoader", "Dataset", "F", "Moved", "Path", "Rows", "Shifted", "Subset", "TensorDataset",
    "Twins", "X", "Y", "copy", "data", "fit", "found", "functools", "hashlib", "json", "loss",
    "net", "nn", "normed", "np", "project", "random", "torch", "trainer", "unisono", "write",
]  # fmt: skip

EPOCHS = int(os.environ.get("PROGRAM_EPOCHS", 4))
STEPS = 6 * EPOCHS
DIR = os.environ.get("PROGRAM_DIRECTORY") or None
LOADERS = int(os.environ.get("PROGRAM_LOADERS", 0))
DEVICE = os.environ.get("PROGRAM_DEVICE", "cpu")
X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
data = TensorDataset(X, Y)
install(DEVICE)


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


def normed() -> nn.Module:
    """Make a net with buffers that draws."""
    norm = nn.BatchNorm1d(8, momentum=0.3)
    return nn.Sequential(nn.Linear(8, 8), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


class Twins(nn.Module):
    """A net, and a slower one that no optimizer updates."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.net, self.target = (make or normed)(), (make or normed)()
        self.target.load_state_dict(self.net.state_dict())
        self.target.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs) - 0.5 * self.target(inputs)

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.target.parameters(), self.net.parameters(), strict=True)

    def sgd(self) -> SGD:
        return SGD(self.net.parameters(), lr=0.1, momentum=0.9)


class Moved(Twins):
    """Moves its slow net in each pass, as MoCo does."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            for target, online in self.pairs():
                target.data = target.data * 0.8 + online.data * 0.2
        return super().forward(inputs)


class Shifted(nn.Sequential):
    """Adds a buffer."""

    def __init__(self) -> None:
        super().__init__(*normed())
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs + self.shift)


class Between(Callback):
    """Changes a model and its optimizer after each step."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def on_step_end(self, fit: Any, step: Any) -> None:
        self.change(fit.model, fit.optimizer)


@functools.cache
def project() -> Path:
    """Make a folder of this process from which a program may import."""
    folder = Path(tempfile.mkdtemp(dir=".")).resolve()
    sys.path.insert(0, str(folder))
    return folder


def write(name: str, text: str = "") -> None:
    """Write a file of the program's project."""
    (path := project() / name).parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trainer(model: nn.Module, loss: Any = loss, optimizer: Any = None, **options: Any) -> Any:
    """Make a trainer as a user would."""
    optimizer = optimizer or SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"shards": 6, "directory": DIR, "device": DEVICE, **options}
    return unisono.Trainer(model, optimizer, loss, **given)


def fit(trainer: Any, data: Any = data, collate: Any = None, **options: Any) -> Any:
    """Train four epochs, with loader processes where they are wanted."""
    if LOADERS or collate:
        options["batch_size"] = None
        given = {"collate_fn": collate, "num_workers": LOADERS}
        data = DataLoader(data, 16, shuffle=options.pop("shuffle", True), **given)
    return trainer.fit(data, **{"batch_size": 16, "epochs": EPOCHS, **options})


@contextmanager
def found(names: dict[str, Any]) -> Iterator[None]:
    """Note what comes of a program: the digests of its runs, or what it raised."""
    said: dict[str, Any] = {"step": 0}
    kinds = (unisono.Run, unisono.Trainer)
    torch.manual_seed(0)
    try:
        yield
        runs = {name: one for name, one in names.items() if isinstance(one, kinds)}
        said["digests"] = {name: one.digest() for name, one in runs.items()}
        said["result"] = names.get("result")
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
        runs = [getattr(one, "run", one) for one in names.values() if isinstance(one, kinds)]
        said["step"] = max((run.position.step for run in runs), default=0)
        raise
    finally:
        said["cpu_s"] = time.process_time() - watching.BEGAN_S
        watching.note(json.dumps(said))


watching.begin()
