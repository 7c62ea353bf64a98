"""Do more shards than workers slow this run down? Measured once, in a fork, and then told.

A worker with several shards makes several small passes a step where one larger pass might be
cheaper. After a few steps rank 0 forks a process that times one pass over the same samples; nothing
but a number comes back from it, so whatever a model or a loss does there, the run does not see it.

Invariant: nothing that fails here, of the program or of the system, ends the run; then there is no
advice. Nor is there for a model on a GPU, which a fork cannot use.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unisono.data.fork import said_by_fork
from unisono.world import World

SLOWER_BY = 1.2
WORTH_S = 30.0  # of a run's time, or nobody has to know
LONGEST_S = 10.0  # others wait for rank 0 meanwhile
_WARMUP_STEPS = 3
_TIMED_STEPS = 5
_NUMBER = struct.Struct("d")


class PassWatch:
    """Times the passes of some steps on rank 0, then one pass over the same samples. Final.

    Args:
        model: the one that trains.
        loss: its loss function.
        world: this worker's place; others than rank 0 watch nothing.
        shards: S.

    Attributes:
        is_watching: whether there are steps to time yet.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Any], world: World, shards: int
    ) -> None:
        self._model, self._loss, self._world, self._shards = model, loss, world, shards
        self.is_watching = world.rank == 0 and shards > world.world_size
        self._steps_to_go = _WARMUP_STEPS + _TIMED_STEPS
        self._batches: list[Any] = []
        self._timed: list[tuple[int, float]] = []  # steps: how many passes, in seconds

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Give the batches of one step on and time their passes; not how long reading takes.

        The batches of the last step that is watched are kept.
        """
        # A step before this one may have ended with an exception that the program has caught.
        self._batches, num_passes, seconds = [], 0, 0.0
        for batch in batches:
            begun_at_s = time.perf_counter()
            yield batch
            # Not when the block ends: by then this worker has waited for the others.
            seconds += time.perf_counter() - begun_at_s
            num_passes += 1
            if self._steps_to_go == 1:
                self._batches.append(batch)
        if self._steps_to_go <= _TIMED_STEPS:
            self._timed.append((num_passes, seconds))

    def advice(self, steps_to_go: float = math.inf) -> str | None:
        """Count a step; after the last one that is watched, say whether fewer shards are faster.

        Args:
            steps_to_go: after it; where they take little time in all, nothing is measured or said.
        """
        self._steps_to_go -= 1
        self.is_watching = self._steps_to_go > 0
        batches, self._batches = self._batches, []
        if self._steps_to_go > 0 or len(batches) < 2:
            return None
        # A short last batch may leave fewer of this worker's shards with samples, or none.
        best_s = min(seconds for num_passes, seconds in self._timed if num_passes == len(batches))
        if best_s * steps_to_go < WORTH_S:
            return None
        longest_s = 10 * _TIMED_STEPS * best_s + 1.0
        together_s = in_a_fork(lambda: self._time_together(batches), longest_s)
        if not together_s or best_s < SLOWER_BY * together_s:
            return None
        if (best_s - together_s) * steps_to_go < WORTH_S:
            return None
        workers = self._world.world_size
        return (
            f"{self._shards} shards on {workers} worker{'s' * (workers > 1)}: the {len(batches)} "
            f"passes of a step take {best_s / together_s:.1f} × the time of one pass over "
            f"the same samples. They keep results the same on up to {self._shards} workers; "
            f"`shards={workers}` is faster here, with other bits."
        )

    def _time_together(self, batches: Sequence[Any]) -> float:
        """Time one pass over all samples, in seconds."""
        batch = joined(batches)
        best_s, end_s = math.inf, time.perf_counter() + LONGEST_S / 2
        for _ in range(_TIMED_STEPS):
            start_s = time.perf_counter()
            if start_s > end_s and best_s < math.inf:
                break
            loss = self._loss(self._model, batch)
            loss = loss["loss"] if isinstance(loss, Mapping) else loss
            (loss[0] if isinstance(loss, tuple) else loss).backward()
            best_s = min(best_s, time.perf_counter() - start_s)
        return best_s


def in_a_fork(measure: Callable[[], float], timeout_s: float) -> float | None:
    """Measure something in a fork of this process, which keeps all its effects.

    Args:
        measure: finds a number.
        timeout_s: how long it may take, at most :data:`LONGEST_S`, in seconds.

    Returns:
        The number, or None: it raised, took too long, the system has no process to give, or this
        one has several threads, whose locks a fork might find taken.
    """
    data = said_by_fork(lambda: _NUMBER.pack(measure()), min(timeout_s, LONGEST_S))
    return float(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else None


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
