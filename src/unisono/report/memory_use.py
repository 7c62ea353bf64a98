"""How much memory of their devices do the workers take?

What some steps say, kept small: over the run the greatest of all workers, and of each worker what
it took last and at most. Runs on CPUs say nothing, and nothing is shown of them. ::

    step 16   allocated 2.1 GB  2.0 GB ──► 2.1 GB      over the run
                        worker 0  1    ──► last, most  of each worker
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from unisono.report.events import Start, StepDone
from unisono.report.series import Series

MAX_WORKERS = 64  # as many rows as are read


class Sizes(NamedTuple):
    """What one worker takes of its device, in bytes; None where a line does not say."""

    allocated: int | None
    reserved: int | None
    peak: int | None


_NOTHING = Sizes(None, None, None)


def sizes_by_rank(step: StepDone) -> Iterator[tuple[int, Sizes]]:
    """Give what a step's line says of each worker's device, if anything."""
    if not any(step.memory):
        return
    columns = (column or (None,) * len(step.ranks) for column in step.memory)
    for rank, *sizes in zip(step.ranks, *columns, strict=True):
        if sizes != [None] * len(sizes):
            yield rank, Sizes(*sizes)


class MemoryUse:
    """The memory of devices over a run. Final.

    Attributes:
        over_steps: for each field of :class:`Sizes`, the greatest of all workers, by step.
        last: what each worker took last.
        most: the greatest of each field, for each worker.
        device_bytes: what a device has, as the first start says; None where it does not.
        num_left_out: workers beyond :data:`MAX_WORKERS`, which have no row.
    """

    def __init__(self) -> None:
        self.over_steps = {name: Series() for name in Sizes._fields}
        self.last: dict[int, Sizes] = {}
        self.most: dict[int, Sizes] = {}
        self.device_bytes: int | None = None
        self._left_out: set[int] = set()

    @property
    def num_left_out(self) -> int:
        """Count the workers that have no row."""
        return len(self._left_out)

    def start(self, start: Start) -> None:
        """Add what the start of a fit says."""
        size = start.machine.get("device_bytes")
        if self.device_bytes is None and type(size) is int and size > 0:
            self.device_bytes = size

    def add(self, step: StepDone) -> None:
        """Add what a step says."""
        found = dict(sizes_by_rank(step))
        for rank, sizes in found.items():
            self._note(rank, sizes)
        greatest = functools.reduce(_greater, found.values(), _NOTHING)
        for series, size in zip(self.over_steps.values(), greatest, strict=True):
            if size is not None:
                series.add(step.step, float(size))

    def _note(self, rank: int, sizes: Sizes) -> None:
        if rank not in self.last and len(self.last) == MAX_WORKERS:
            if len(self._left_out) < MAX_WORKERS:
                self._left_out.add(rank)
            return
        self.last[rank] = sizes
        self.most[rank] = _greater(self.most.get(rank, _NOTHING), sizes)


def _greater(one: Sizes, other: Sizes) -> Sizes:
    pairs = zip(one, other, strict=True)
    return Sizes(*(max((n for n in pair if n is not None), default=None) for pair in pairs))
