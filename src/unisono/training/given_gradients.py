"""Gradients that a program passes for a whole step: are they valid, and equal on all workers?"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from unisono.engine.exchange.snapshots import as_bytes
from unisono.engine.step.engine import StepEngine
from unisono.errors import MismatchError
from unisono.training.run_context import RunContext


def check_given(gradients: Mapping[str, torch.Tensor], engine: StepEngine, run: RunContext) -> None:
    """Raise if gradients are not valid, or differ between workers. Collective."""
    if run.takes_closure or engine.passes.scaling is not None:
        what = "an optimizer that takes a closure" if run.takes_closure else "a scaler of the loss"
        raise ValueError(
            f"`step.update(gradients=…)` computes no loss, but the run has {what}, which needs "
            f"one: make the run without it."
        )
    shapes = dict(zip(engine.sums.names, engine.exchange.parameters, strict=True))
    value = 0
    for name, gradient in sorted(gradients.items()):
        if name not in shapes:
            raise ValueError(
                f"`gradients` must be by the names of parameters that the optimizer updates, but "
                f"{name!r} is none of the {len(shapes)}, such as {next(iter(shapes))!r}."
            )
        if not isinstance(gradient, torch.Tensor) or gradient.shape != shapes[name].shape:
            seen = getattr(gradient, "shape", type(gradient).__name__)
            raise ValueError(
                f"`gradients` must have their parameters' shapes, but that of {name!r} is "
                f"{seen!s} instead of {tuple(shapes[name].shape)}."
            )
        value = zlib.crc32(as_bytes(gradient.detach()), zlib.crc32(name.encode(), value))
    votes = run.team.vote(value, "given gradients")
    if votes is not None and len(set(votes.values())) > 1:
        raise MismatchError(
            "`step.update(gradients=…)` must be given the same gradients on every worker, but they "
            "differ: compute them from the same samples on each, not under `if rank == 0`, and "
            "draw with the default generators."
        )
