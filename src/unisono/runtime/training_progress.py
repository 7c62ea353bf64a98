"""Where in the run is what is computed now? For programs that change in its course."""

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
    """See :func:`progress`."""

    step: int
    epoch: int
    batch: int
    shard: int | None


@final
class Now:
    """Where this process is; its threads see the same."""

    def __init__(self) -> None:
        self.at: At = (0, 0, 0, None)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Be where we were after a block."""
        before = self.at
        try:
            yield
        finally:
            self.at = before


@functools.cache
def now() -> Now:
    """Return where this process is."""
    return Now()


def progress() -> TrainingProgress:
    """Return where the run is: for a loss, a model, a data set, a collate function, a callback.

    For what changes in the course of training: an annealed weight, a curriculum, a schedule of
    augmentations. A counter of the program's own would depend on how many workers there are; this
    is the same on any number of them, in loader processes, and when a run is resumed.

    Returns:
        An object with these attributes, all counted from 0:

        * ``step``: over the whole run. In ``evaluate`` and ``predict``, how many are done.
        * ``epoch``: likewise.
        * ``batch``: which global batch of the epoch, or of the evaluation.
        * ``shard``: which part of it; None where none is computed, as in callbacks and streams.

        Where samples are read, those that they are read for, also if that is ahead of the step
        under way. A stream is told its epoch alone: the step and batch are those with which that
        begins. Between two steps: the last one. Where no run is under way, all are 0, so that a
        data set can be indexed by hand.
    """
    return TrainingProgress(*now().at)
