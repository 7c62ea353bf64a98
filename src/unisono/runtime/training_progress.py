"""Where in the run is the current computation? For programs that change during training."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

At = tuple[int, int, int, int | None]
"""Step, epoch, batch and shard."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The position that :func:`progress` returns."""

    step: int
    epoch: int
    batch: int
    shard: int | None


@final
class Now:
    """The current position of this process; shared by its threads."""

    def __init__(self) -> None:
        self.at: At = (0, 0, 0, None)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore the position after the block."""
        before = self.at
        try:
            yield
        finally:
            self.at = before


@functools.cache
def now() -> Now:
    """Return the position of this process."""
    return Now()


def progress() -> TrainingProgress:
    """Return where the run is: for a loss, a model, a dataset, a collate function, a callback.

    Use it for anything that changes during training: an annealed weight, a curriculum, a schedule
    of augmentations. A counter in the program would depend on the number of workers; this position
    is the same for any number of workers, in loader processes, and when a run is resumed.

    Returns:
        An object with these attributes, all counted from 0:

        * ``step``: of the whole run. In ``evaluate`` and ``predict``, the number of steps done.
        * ``epoch``: of the whole run, in the same way.
        * ``batch``: the global batch within the epoch, or within the evaluation.
        * ``shard``: the part of the batch; None outside of shards, as in callbacks and streams.

        Code that reads samples gets the position that the samples are for, even if it is ahead of
        the current step. A stream only gets its epoch, with the step and batch at which the epoch
        begins. Between two steps, the position is that of the last one. Outside of a run, all are
        0, so that you can index a dataset by hand.
    """
    return TrainingProgress(*now().at)
