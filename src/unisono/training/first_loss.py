"""Is a resumed program the one that wrote the checkpoint? Compared by what it computes.

Before anything is restored, the leader computes the loss of one sample with the program's first
weights. Checkpoints keep the number. Another one shows that the loss function, the model, or a
value that they use, such as one drawn without a seed, is no longer the same. A forked process
computes it while the checkpoint is read, so that it changes nothing here; where that is not
possible, takes long, or the loss needs other samples, it is unknown. The sample is one that was
read for the fingerprint of the dataset: if a dataset stores on disk what it has read, it has done.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from unisono.data.loader_processes import LoaderProcesses
from unisono.engine.step.loss import read_loss
from unisono.programs.hashes import hashed
from unisono.runtime.device import HOST, num_threads, seed_generators
from unisono.training.computing import is_compiled
from unisono.training.identity import FINGERPRINT, IMPLY_FINGERPRINT, SAMPLES
from unisono.training.loop_plan import LoopPlan
from unisono.training.run_context import RunContext, samples_seen

FIRST_LOSS = "first loss"
_TIMES, _WEIGHTS = 4, 64  # BatchNorm needs several samples
_WITHIN_S = 0.5


def first_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a few weights of each parameter."""
    named = model.named_parameters()
    return {name: each.detach().reshape(-1)[:_WEIGHTS] for name, each in named if not is_lazy(each)}


@contextmanager
def first_loss_computed(run: RunContext, plan: LoopPlan) -> Iterator[Callable[[], str]]:
    """Compute the loss of a sample within a block, which gets a function to take it.

    That returns the weights and the loss as text; "" if the loss is unknown.
    """
    loss, model = run.loss, run.kept.model
    read = [name.split()[1] for name in samples_seen(run, plan) if name.startswith("sample ")]
    process: LoaderProcesses | None = None

    def compute(_: object) -> str:
        with open(os.devnull, "w") as nowhere, num_threads(1):
            sys.stdout = sys.stderr = nowhere  # a loss may print
            for descriptor in (1, 2):
                os.dup2(nowhere.fileno(), descriptor)
            batch = plan.fetch()(torch.full((_TIMES,), int(read[0]), device=HOST))
            seed_generators(plan.samples.seed)
            value = read_loss(loss and loss(model, batch), _TIMES).tensor.item()
        return f"{hashed(first_weights(model))} {value:.9g}"

    def take() -> str:
        with suppress(Exception):
            if process is not None and process.is_ready(_WITHIN_S):
                return str(process.take())
        return ""

    can_fork = run.device.is_host and threading.active_count() == 1  # others might hold a lock
    is_known = loss is not None and read and not is_compiled(model)
    if can_fork and is_known and run.num_loops == 1:
        with suppress(Exception):
            process = LoaderProcesses(compute, 1, iter([None]))
    try:
        yield take
    finally:
        if process is not None:
            process.close(grace_s=0.0)


def other_program(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return how a program differs from that of its checkpoint, given the identities; or ""."""
    weights, _, loss = str(there.get(FIRST_LOSS, "")).partition(" ")
    weights_now, _, loss_now = str(here.get(FIRST_LOSS, "")).partition(" ")
    known = (*IMPLY_FINGERPRINT, FINGERPRINT, "precision")
    is_alike = all(there.get(name) == here.get(name) for name in known) and weights == weights_now
    samples, samples_now = there.get(SAMPLES) or {}, here.get(SAMPLES) or {}
    is_alike &= all(samples.get(at, sample) == sample for at, sample in samples_now.items())
    if not (loss and loss_now and is_alike) or loss == loss_now:
        return ""
    return (
        f"the program computes something else than the one that wrote the checkpoint: with the "
        f"same first weights, the loss of a sample was {loss} there and is {loss_now} now. The "
        f"loss function, the model, or a value that they use (one drawn without a seed, perhaps) "
        f"is not the same: training continues, but the result will differ from that of an "
        f"uninterrupted run"
    )
