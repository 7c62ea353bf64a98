"""Do more shards than workers slow this run down? Measured once, on a copy, and then told.

A worker with several shards makes several small passes a step where one larger pass might be
cheaper. After a few steps rank 0 times one pass over the same samples with a copy of the model.
Only clocks come out of it: parameters, buffers and generators stay as they are.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.engine.randomness import generators_put_back
from unisono.world import World

SLOWER_BY = 1.2
_WARMUP_STEPS = 3
_TIMED_STEPS = 5


class PassWatch:
    """Times the passes of some steps on rank 0, then one pass over the same samples. Final.

    Args:
        model: the one that trains.
        loss: its loss function.
        world: this worker's place; others than rank 0 watch nothing.
        shards: S.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Any], world: World, shards: int
    ) -> None:
        self._model, self._loss, self._world, self._shards = model, loss, world, shards
        self._steps_to_go = _WARMUP_STEPS + _TIMED_STEPS
        if world.rank != 0 or shards <= world.world_size:
            self._steps_to_go = 0
        self._best_s = float("inf")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the passes of one step."""
        start_s = time.perf_counter()
        yield
        if 0 < self._steps_to_go <= _TIMED_STEPS:
            self._best_s = min(self._best_s, time.perf_counter() - start_s)

    def advice(self, batches: Sequence[Any]) -> str | None:
        """Count a step; after the last one that is watched, say whether fewer shards are faster."""
        if self._steps_to_go == 0:
            return None
        self._steps_to_go -= 1
        if self._steps_to_go > 0 or len(batches) < 2:
            return None
        together_s = self._time_together(batches)
        if together_s is None or self._best_s < SLOWER_BY * together_s:
            return None
        workers = self._world.world_size
        return (
            f"{self._shards} shards on {workers} worker{'s' * (workers > 1)}: the {len(batches)} "
            f"passes of a step take {self._best_s / together_s:.1f} × the time of one pass over "
            f"the same samples. They keep results the same on up to {self._shards} workers; "
            f"`shards={workers}` is faster here, with other bits."
        )

    def _time_together(self, batches: Sequence[Any]) -> float | None:
        """Time one pass over all samples, in seconds; None where batches cannot be joined."""
        try:
            batch = joined(batches)
            model = copy.deepcopy(self._model)
        except (TypeError, RuntimeError):
            return None
        best_s = float("inf")
        with generators_put_back():
            for _ in range(_TIMED_STEPS):
                start_s = time.perf_counter()
                loss = self._loss(model, batch)
                loss = loss["loss"] if isinstance(loss, Mapping) else loss
                (loss[0] if isinstance(loss, tuple) else loss).backward()
                best_s = min(best_s, time.perf_counter() - start_s)
        return best_s


def joined(batches: Sequence[Any]) -> Any:
    """Make one batch of several: tensors are concatenated, whatever holds them is kept.

    Raises:
        TypeError: something in a batch is neither a tensor nor holds tensors.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {key: joined([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (list, tuple)):
        parts = [joined(part) for part in zip(*batches, strict=True)]
        return parts if isinstance(first, list) else tuple(parts)
    raise TypeError(f"batches of {type(first).__name__} cannot be joined.")
