"""Where does the time of a step go, in each worker?

What is kept of a stretch of steps is, for each rank, the sum of its seconds in each phase. What a
step lasted beyond its phases (callbacks, evaluation, the time to find out that a worker is lost)
is called *between*.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.report.events import PHASES, Column, StepDone
from unisono.report.series import Buckets

MAX_WORKERS = 64  # as many rows as can be told apart
WAITING = PHASES.index("waiting")
_COMPUTING = tuple(PHASES.index(name) for name in ("loading", "forward", "backward"))


@dataclass(slots=True)
class Spent:
    """Seconds of one worker in each phase, and over how many steps."""

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
    def waiting_share(self) -> float | None:
        """The part of them that was waiting; None if there were none."""
        return self.phases_s[WAITING] / self.total_s if self.total_s > 0 else None

    @property
    def shares(self) -> Mapping[str, float]:
        """The part of them that each phase took; empty if there were none."""
        total_s = self.total_s
        if total_s <= 0:
            return {}
        return {name: self.phases_s[i] / total_s for i, name in enumerate(PHASES)}

    @property
    def computing_s(self) -> float:
        """The seconds of loading, forward and backward pass, a step."""
        return sum(self.phases_s[i] for i in _COMPUTING) / max(self.num_steps, 1)


@dataclass(slots=True)
class Stretch:
    """What the workers spent in some neighbouring steps."""

    first_step: int
    last_step: int
    num_steps: int
    seconds: float
    by_rank: dict[int, Spent]

    def absorb(self, later: Stretch, /) -> None:
        """Take in the steps that follow."""
        self.last_step = later.last_step
        self.num_steps += later.num_steps
        self.seconds += later.seconds
        for rank, spent in later.by_rank.items():
            if rank in self.by_rank:
                self.by_rank[rank].add(spent)
            else:
                self.by_rank[rank] = spent

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


@dataclass
class PhaseTimes:
    """Where the time goes, kept small: over the run, and in all of it for each worker.

    Attributes:
        together: what each worker spent in those steps that the most workers took part in: whoever
            computes for a lost one is not slow.
        num_left_out: how many steps of workers beyond :data:`MAX_WORKERS` were left out.
    """

    max_buckets: int = 200
    together: dict[int, Spent] = field(default_factory=dict)
    num_left_out: int = 0
    buckets: Buckets[Stretch] = field(init=False)

    _apart: dict[int, Spent] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)
    _most: int = 0

    def __post_init__(self) -> None:
        self.buckets = Buckets(self.max_buckets)

    def add(self, step: StepDone) -> None:
        """Add a step; one without any columns is passed over."""
        spent = spent_by_rank(step)
        if not spent.keys() <= self._known:
            spent = self._those_with_a_row(spent)
        if len(spent) > self._most:
            add_up(self._apart, self.together)
            self._most, self.together = len(spent), {}
        add_up(self.together if len(spent) == self._most else self._apart, spent)
        if spent:
            self.buckets.add(Stretch(step.step, step.step, 1, step.seconds or 0.0, spent))

    def _those_with_a_row(self, spent: dict[int, Spent]) -> dict[int, Spent]:
        for rank in spent:
            if len(self._known) < MAX_WORKERS:
                self._known.add(rank)
        kept = {rank: one for rank, one in spent.items() if rank in self._known}
        self.num_left_out += len(spent) - len(kept)
        return kept

    @property
    def by_rank(self) -> dict[int, Spent]:
        """What each worker spent in the whole run."""
        found: dict[int, Spent] = {}
        add_up(found, self.together)
        add_up(found, self._apart)
        return found

    @property
    def stretches(self) -> list[Stretch]:
        """What is kept of the run, first to last."""
        return self.buckets.stretches

    @property
    def ranks(self) -> list[int]:
        """The workers, by rank."""
        return sorted(self._known)


def add_up(sums: dict[int, Spent], more: Mapping[int, Spent]) -> None:
    """Add what each worker spent to what it had spent."""
    for rank, spent in more.items():
        sums.setdefault(rank, Spent([0.0] * len(PHASES), 0)).add(spent)


def spent_by_rank(step: StepDone) -> dict[int, Spent]:
    """Return what each worker spent in a step; whoever has no entry was lost in it."""
    nothing: Column = (None,) * len(step.ranks)
    columns = [step.phase(name) or nothing for name in PHASES]
    return {
        rank: Spent([entry or 0.0 for entry in entries], 1)
        for rank, entries in zip(step.ranks, zip(*columns, strict=True), strict=True)
        if entries.count(None) < len(entries)
    }


def slowest(by_rank: dict[int, Spent]) -> tuple[int, float] | None:
    """Return the worker that computes longest a step, and how many times the others' median.

    None where there are not two workers, or where nothing was measured.
    """
    times = sorted((spent.computing_s, rank) for rank, spent in by_rank.items())
    if len(times) < 2:
        return None
    longest, rank = times[-1]
    others = [seconds for seconds, _ in times[:-1]]
    middle = len(others) // 2
    median = others[middle] if len(others) % 2 else (others[middle - 1] + others[middle]) / 2
    return (rank, longest / median) if median > 0 else None
