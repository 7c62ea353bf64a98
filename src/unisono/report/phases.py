"""Where does the time of a step go, in each worker?

For each stretch of steps and each membership that computed some of them, the sum of the seconds in
each phase is kept: of all workers at once, as nearly all steps have the same. ::

    membership (0, 1)   loading of 0, of 1, forward of 0, of 1, backward of 0, …

What a step lasted beyond its phases (callbacks, evaluation, the time to find out that a worker is
lost) is called *between*.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from unisono.report.events import PHASES, StepDone
from unisono.report.series import Buckets

MAX_CREWS = 1000  # only a made-up file has more
MAX_WORKERS = 64  # as many rows as can be told apart
WAITING = PHASES.index("waiting")
Crew: TypeAlias = "tuple[int, ...]"

_COMPUTING = tuple(PHASES.index(name) for name in ("loading", "forward", "backward"))


@dataclass(slots=True)
class Spent:
    """Seconds of one worker, or of a membership, in each phase, and over how many steps."""

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
class PhaseSpan:
    """What the workers spent in some neighbouring steps, by those who computed a step together."""

    first_step: int
    last_step: int
    num_steps: int
    seconds: float
    by_membership: dict[Crew, Spent]

    def absorb(self, later: PhaseSpan, /) -> None:
        """Take in the steps that follow."""
        self.last_step = later.last_step
        self.num_steps += later.num_steps
        self.seconds += later.seconds
        add_up(self.by_membership, later.by_membership)

    @property
    def by_rank(self) -> dict[int, Spent]:
        """What each worker spent."""
        return _by_rank(self.by_membership)

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
        num_left_out: how many steps of workers beyond :data:`MAX_WORKERS` were left out.
    """

    max_buckets: int = 200
    num_left_out: int = 0
    buckets: Buckets[PhaseSpan] = field(init=False)

    _by_membership: dict[Crew, Spent] = field(default_factory=dict)
    _ranks: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.buckets = Buckets(self.max_buckets)

    def add(self, step: StepDone) -> None:
        """Add a step; one without any columns is passed over."""
        membership = step.ranks
        seconds: list[Any] = list(chain.from_iterable(step.phases))
        is_whole = len(seconds) == len(membership) * len(PHASES) and None not in seconds
        if membership not in self._by_membership or not is_whole:
            membership, seconds = self._with_a_row(spent_by_rank(step))
        if membership:
            spent = {membership: Spent(seconds, 1)}
            add_up(self._by_membership, spent)
            self.buckets.add(PhaseSpan(step.step, step.step, 1, step.seconds or 0.0, spent))

    def _with_a_row(self, spent: Mapping[int, Spent]) -> tuple[Crew, list[Any]]:
        for rank in spent:
            if len(self._ranks) < MAX_WORKERS:
                self._ranks.add(rank)
        membership = tuple(rank for rank in spent if rank in self._ranks)
        if membership not in self._by_membership and len(self._by_membership) == MAX_CREWS:
            membership = ()
        self.num_left_out += len(spent) - len(membership)
        return membership, [
            spent[rank].phases_s[i] for i in range(len(PHASES)) for rank in membership
        ]

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
        return _by_rank(self._by_membership)

    @property
    def together(self) -> dict[int, Spent]:
        """The same, in those steps alone that the most workers took part in.

        Whoever computes for a lost one is not slow.
        """
        most = max(map(len, self._by_membership), default=0)
        return _by_rank(
            {
                membership: one
                for membership, one in self._by_membership.items()
                if len(membership) == most
            }
        )


K = TypeVar("K")


def add_up(sums: dict[K, Spent], more: Mapping[K, Spent]) -> None:
    """Add what each spent to what it had spent."""
    for key, spent in more.items():
        if key in sums:
            sums[key].add(spent)
        else:
            sums[key] = Spent(list(spent.phases_s), spent.num_steps)


def _by_rank(by_membership: Mapping[Crew, Spent]) -> dict[int, Spent]:
    found: dict[int, Spent] = {}
    for membership, spent in by_membership.items():
        for at, rank in enumerate(membership):
            own = Spent(spent.phases_s[at :: len(membership)], spent.num_steps)
            add_up(found, {rank: own})
    return found


def spent_by_rank(step: StepDone) -> dict[int, Spent]:
    """Return what each worker spent in a step; whoever has no entry was lost in it."""
    nothing: tuple[float | None, ...] = (None,) * len(step.ranks)
    columns = [column or nothing for column in step.phases]
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
