"""Where does the time of a step go, in each worker?

For each stretch of steps, and for each worker, the sum of the seconds in each phase is kept. What a
step lasted beyond its phases (callbacks, evaluation, the time to find out that a worker is lost) is
called *between*.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unisono.report.events import PHASES, StepDone
from unisono.report.series import Series

MAX_WORKERS = 64  # as many rows as can be told apart


@dataclass(slots=True)
class Spent:
    """Seconds of one worker, or of several, in each phase, and over how many steps."""

    phases_s: list[float]
    num_steps: int

    def add(self, other: Spent) -> None:
        """Add another's seconds."""
        self.phases_s = list(map(operator.add, self.phases_s, other.phases_s))
        self.num_steps += other.num_steps

    @property
    def total_s(self) -> float:
        """The seconds of all phases."""
        return sum(self.phases_s)

    @property
    def shares(self) -> Mapping[str, float]:
        """The part of them that each phase took; empty if there were none."""
        total_s = self.total_s
        if total_s <= 0:
            return {}
        return {name: self.phases_s[i] / total_s for i, name in enumerate(PHASES)}

    @property
    def working_s(self) -> float | None:
        """The seconds of all phases but waiting, a step; None if there were none."""
        share = self.shares.get("waiting")
        return None if share is None else self.total_s * (1 - share) / max(self.num_steps, 1)


class PhaseTimes:
    """Where the time goes, kept small: over the run, and in all of it for each worker. Final.

    Attributes:
        over_steps: the seconds of each phase and of what is between, in the mean of workers.
        by_rank: what each worker spent in the whole run; at most :data:`MAX_WORKERS` of them.
        has_left_out: whether there were more.
    """

    def __init__(self, max_stretches: int = 200) -> None:
        self.over_steps = {name: Series(max_stretches) for name in (*PHASES, "between")}
        self.by_rank: dict[int, Spent] = {}
        self.has_left_out = False

    def add(self, step: StepDone) -> None:
        """Add a step; one without any columns is passed over."""
        found = list(spent_by_rank(step))
        for rank, spent in found:
            if rank in self.by_rank:
                self.by_rank[rank].add(spent)
            elif len(self.by_rank) < MAX_WORKERS:
                self.by_rank[rank] = Spent(spent.phases_s, 1)
            else:
                self.has_left_out = True
        if found:
            columns = zip(*[spent.phases_s for _, spent in found], strict=True)
            means = [sum(column) / len(found) for column in columns]
            between_s = max((step.seconds or 0.0) - sum(means), 0.0)
            for series, mean_s in zip(self.over_steps.values(), [*means, between_s], strict=True):
                series.add(step.step, mean_s)


def spent_by_rank(step: StepDone) -> Iterator[tuple[int, Spent]]:
    """Give what each worker spent in a step; one without an entry was lost in it."""
    nothing: tuple[float | None, ...] = (None,) * len(step.ranks)
    columns = [column or nothing for column in step.phases]
    for rank, *entries in zip(step.ranks, *columns, strict=True):
        if entries.count(None) < len(entries):
            yield rank, Spent([entry or 0.0 for entry in entries], 1)
