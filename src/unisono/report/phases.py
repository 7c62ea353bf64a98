"""Where does the time of a step go, in each worker?

For each stretch of steps, and each group of ranks that computed some of them together, the sum of
the seconds in each phase is kept: of all workers at once, as nearly all steps have the same. ::

    ranks (0, 1)   loading of 0, of 1, forward of 0, of 1, backward of 0, …

What a step lasted beyond its phases (callbacks, evaluation, the time to find out that a worker is
lost) is called *between*.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from unisono.report.events import PHASES, StepDone
from unisono.report.series import Buckets

MAX_GROUPS_OF_RANKS = 1000  # only a made-up file has more
MAX_WORKERS = 64  # as many rows as can be told apart

K = TypeVar("K")
Ranks: TypeAlias = "tuple[int, ...]"


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
    """What the workers spent in some neighbouring steps, by those who computed a step together."""

    first_step: int
    last_step: int
    num_steps: int
    seconds: float
    by_ranks: dict[Ranks, Spent]

    def absorb(self, later: PhaseSpan, /) -> None:
        """Take in the steps that follow."""
        self.last_step = later.last_step
        self.num_steps += later.num_steps
        self.seconds += later.seconds
        add_up(self.by_ranks, later.by_ranks)

    @property
    def by_rank(self) -> dict[int, Spent]:
        """What each worker spent."""
        return _by_rank(self.by_ranks)

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
        self._groups: set[Ranks] = set()

    def add(self, step: StepDone) -> None:
        """Add a step; one without any columns is passed over."""
        ranks = step.ranks
        seconds: list[Any] = list(chain.from_iterable(step.phases))
        is_whole = len(seconds) == len(ranks) * len(PHASES) and None not in seconds
        if ranks not in self._groups or not is_whole:
            ranks, seconds = self._with_a_row(spent_by_rank(step))
        if ranks:
            spent = {ranks: Spent(seconds, 1)}
            self.buckets.add(PhaseSpan(step.step, step.step, 1, step.seconds or 0.0, spent))

    def _with_a_row(self, spent: Mapping[int, Spent]) -> tuple[Ranks, list[Any]]:
        for rank in spent:
            if len(self._ranks) < MAX_WORKERS:
                self._ranks.add(rank)
        ranks = tuple(rank for rank in spent if rank in self._ranks)
        if len(self._groups) < MAX_GROUPS_OF_RANKS:
            self._groups.add(ranks)
        elif ranks not in self._groups:
            ranks = ()
        self.num_left_out += len(spent) - len(ranks)
        return ranks, [spent[rank].phases_s[i] for i in range(len(PHASES)) for rank in ranks]

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
        return _by_rank(self._whole())

    def _whole(self) -> dict[Ranks, Spent]:
        found: dict[Ranks, Spent] = {}
        for stretch in self.buckets.stretches:
            add_up(found, stretch.by_ranks)
        return found


def add_up(sums: dict[K, Spent], more: Mapping[K, Spent]) -> None:
    """Add what each spent to what it had spent."""
    for key, spent in more.items():
        if key in sums:
            sums[key].add(spent)
        else:
            sums[key] = Spent(list(spent.phases_s), spent.num_steps)


def _by_rank(by_ranks: Mapping[Ranks, Spent]) -> dict[int, Spent]:
    found: dict[int, Spent] = {}
    for ranks, spent in by_ranks.items():
        for at, rank in enumerate(ranks):
            add_up(found, {rank: Spent(spent.phases_s[at :: len(ranks)], spent.num_steps)})
    return found


def spent_by_rank(step: StepDone) -> dict[int, Spent]:
    """Return what each worker spent in a step; one without an entry was lost in it."""
    nothing: tuple[float | None, ...] = (None,) * len(step.ranks)
    columns = [column or nothing for column in step.phases]
    return {
        rank: Spent([entry or 0.0 for entry in entries], 1)
        for rank, entries in zip(step.ranks, zip(*columns, strict=True), strict=True)
        if entries.count(None) < len(entries)
    }
