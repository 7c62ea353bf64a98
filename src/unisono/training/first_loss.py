"""Is a resumed program the one that wrote the checkpoint? Compared by what it computes.

Before anything is restored, the leader computes the loss of the dataset's first samples with the
program's first weights. Checkpoints keep the number. Another one shows that the loss function, the
model, or a value that they use, such as one drawn without a seed, is no longer the same. A forked
process computes it while the checkpoint is read, so that it changes nothing here; where that is not
possible, takes long, or the loss needs other samples, it is unknown.
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

from unisono.data.data_reading import is_stream
from unisono.data.loader_processes import LoaderProcesses
from unisono.engine.step.loss import read_loss
from unisono.programs.hashes import hashed
from unisono.runtime.device import num_threads, seed_generators
from unisono.training.computing import is_compiled
from unisono.training.identity import FINGERPRINT, IMPLY_FINGERPRINT, SAMPLES
from unisono.training.loop_plan import LoopPlan
from unisono.training.run_context import RunContext

FIRST_LOSS = "first loss"
_SAMPLES, _WEIGHTS = 4, 64
_WITHIN_S = 0.5


def first_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a few weights of each parameter."""
    named = model.named_parameters()
    return {name: each.detach().reshape(-1)[:_WEIGHTS] for name, each in named if not is_lazy(each)}


@contextmanager
def first_loss_computed(run: RunContext, plan: LoopPlan) -> Iterator[Callable[[], str]]:
    """Compute the loss of the first samples within a block, which gets a function to take it.

    That returns the weights and the loss as text; "" if the loss is unknown.
    """
    loss, model, dataset = run.loss, run.kept.model, plan.reading.dataset
    process: LoaderProcesses | None = None

    def compute(_: object) -> str:
        number = min(_SAMPLES, plan.samples.num_samples)
        with open(os.devnull, "w") as nowhere, num_threads(1):
            sys.stdout = sys.stderr = nowhere  # a loss may print
            for descriptor in (1, 2):
                os.dup2(nowhere.fileno(), descriptor)
            batch = plan.fetch()(torch.arange(number))
            seed_generators(plan.samples.seed)
            value = read_loss(loss and loss(model, batch), number).tensor.item()
        return f"{hashed(first_weights(model))} {value:.9g}"

    def take() -> str:
        with suppress(Exception):
            if process is not None and process.is_ready(_WITHIN_S):
                return str(process.take())
        return ""

    can_fork = run.device.is_host and threading.active_count() == 1  # others might hold a lock
    is_known = loss is not None and not is_stream(dataset) and not is_compiled(model)
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
        f"same first weights and samples, the loss was {loss} there and is {loss_now} now. The "
        f"loss function, the model, or a value that they use (one drawn without a seed, perhaps) "
        f"is not the same: training continues, but the result will differ from that of an "
        f"uninterrupted run"
    )
