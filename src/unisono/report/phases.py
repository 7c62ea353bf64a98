"""Where does the time of a step go, in each worker?

For each stretch of steps, and each worker that computed some of them, the sum of the seconds in
each phase is kept. What a step lasted beyond its phases (callbacks, evaluation, the time to find
out that a worker is lost) is called *between*.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.report.events import PHASES, StepDone
from unisono.report.series import Buckets

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


@dataclass(slots=True)
class PhaseSpan:
    """What each worker spent in some neighbouring steps."""

    first_step: int
    last_step: int
    num_steps: int
    seconds: float
    by_rank: dict[int, Spent]

    def absorb(self, later: PhaseSpan, /) -> None:
        """Take in the steps that follow."""
        self.last_step = later.last_step
        self.num_steps += later.num_steps
        self.seconds += later.seconds
        add_up(self.by_rank, later.by_rank)

    @property
    def per_step_s(self) -> list[float]:
        """The seconds of each phase and of what is between, in the mean of workers, a step."""
        spent = list(self.by_rank.values())
        attended = sum(one.num_steps for one in spent)
        if not attended:
            return [0.0] * len(PHASES) + [self.seconds / self.num_steps]
        phases_s = [sum(one.phases_s[i] for one in spent) / attended for i in range(len(PHASES))]
        between_s = self.seconds / self.num_steps - sum(phases_s)
        return [*phases_s, max(between_s, 0.0)]


class PhaseTimes:
    """Where the time goes, kept small: over the run, and in all of it for each worker. Final.

    Attributes:
        buckets: what is kept of the run, first to last.
        num_left_out: how many steps of workers beyond :data:`MAX_WORKERS` were left out.
    """

    def __init__(self, max_buckets: int = 200) -> None:
        self.buckets: Buckets[PhaseSpan] = Buckets(max_buckets)
        self.num_left_out = 0
        self._ranks: set[int] = set()

    def add(self, step: StepDone) -> None:
        """Add a step; one without any columns is passed over."""
        found = spent_by_rank(step)
        for rank in found:
            if len(self._ranks) < MAX_WORKERS:
                self._ranks.add(rank)
        spent = {rank: one for rank, one in found.items() if rank in self._ranks}
        self.num_left_out += len(found) - len(spent)
        if spent:
            self.buckets.add(PhaseSpan(step.step, step.step, 1, step.seconds or 0.0, spent))

    @property
    def stretches(self) -> list[PhaseSpan]:
        """What is kept of the run, first to last."""
        return self.buckets.stretches

    @property
    def ranks(self) -> list[int]:
        """The workers, by rank."""
        return sorted(self.by_rank)

    @property
    def by_rank(self) -> dict[int, Spent]:
        """What each worker spent in the whole run; at most :data:`MAX_WORKERS` of them."""
        found: dict[int, Spent] = {}
        for stretch in self.stretches:
            add_up(found, stretch.by_rank)
        return found


def add_up(sums: dict[int, Spent], more: Mapping[int, Spent]) -> None:
    """Add what each worker spent to what it had spent."""
    for rank, spent in more.items():
        if rank in sums:
            sums[rank].add(spent)
        else:
            sums[rank] = Spent(list(spent.phases_s), spent.num_steps)


def spent_by_rank(step: StepDone) -> dict[int, Spent]:
    """Return what each worker spent in a step; one without an entry was lost in it."""
    nothing: tuple[float | None, ...] = (None,) * len(step.ranks)
    columns = [column or nothing for column in step.phases]
    return {
        rank: Spent([entry or 0.0 for entry in entries], 1)
        for rank, entries in zip(step.ranks, zip(*columns, strict=True), strict=True)
        if entries.count(None) < len(entries)
    }
