"""Who has come to make a process group, and who is missing? Pure: (state, event) → outcomes.

A rank that calls ``init_process_group`` waits here until all have called it. torch has no such
meeting. With it, a program may make groups one after the other at the same address, and a rank that
will never come is named at once. (Where one is that is late is for ``hang_watch`` to say.)

Invariant: a worker waits in one gathering at most; each gathering ends for all its workers at the
same moment, well or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.notices import listed
from unisono.workers.launcher_messages import GroupRequest, Refused, Why


@dataclass(frozen=True, slots=True)
class Arrival:
    """A worker has come, at time `now` of a monotonic clock, in seconds."""

    worker: int
    request: GroupRequest
    now: float

    @property
    def due_s(self) -> float:
        """Until when it waits."""
        return self.now + self.request.timeout_s


@dataclass(frozen=True, slots=True)
class Gathering:
    """Those who wait for each other at one place."""

    came: tuple[Arrival, ...]

    @property
    def place(self) -> str:
        """Where they are."""
        return self.came[0].request.place

    @property
    def world_size(self) -> int:
        """How many they are to be."""
        return self.came[0].request.world_size

    @property
    def workers(self) -> frozenset[int]:
        """Who waits."""
        return frozenset(arrival.worker for arrival in self.came)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not come."""
        ranks = {arrival.request.rank for arrival in self.came}
        return tuple(rank for rank in range(self.world_size) if rank not in ranks)

    @property
    def due_s(self) -> float:
        """When something has to happen at the latest."""
        return min(arrival.due_s for arrival in self.came)


@dataclass(frozen=True, slots=True)
class GatheringState:
    """What is known.

    Attributes:
        present: the workers that still run.
        ended: those that do not, in the order in which they left.
        open: the gatherings under way.
    """

    present: frozenset[int]
    ended: tuple[int, ...] = ()
    open: tuple[Gathering, ...] = ()

    @property
    def waiting(self) -> frozenset[int]:
        """All who wait."""
        return frozenset(self.places)

    @property
    def places(self) -> dict[int, str]:
        """Where each of those waits."""
        return {worker: one.place for one in self.open for worker in one.workers}

    @property
    def due_s(self) -> float:
        """When to :func:`look` at the latest; never if nobody waits."""
        return min((gathering.due_s for gathering in self.open), default=math.inf)

    def without(self, gathering: Gathering) -> GatheringState:
        """Return the state in which that gathering has ended."""
        return replace(self, open=tuple(g for g in self.open if g is not gathering))


@dataclass(frozen=True, slots=True)
class Complete:
    """All have come: let them continue."""

    gathering: Gathering


@dataclass(frozen=True, slots=True)
class Refuse:
    """These workers cannot come together."""

    workers: frozenset[int]
    answer: Refused


Outcomes = tuple[Complete | Refuse, ...]


def come(state: GatheringState, arrival: Arrival) -> tuple[GatheringState, Outcomes]:
    """Take one more worker."""
    here = next((g for g in state.open if g.place == arrival.request.place), None)
    if here is None:
        return _settled(replace(state, open=(*state.open, Gathering((arrival,)))))
    state = state.without(here)
    reason = _why_not(here, arrival)
    if reason:
        return state, (Refuse(here.workers | {arrival.worker}, Refused(reason)),)
    here = replace(here, came=(*here.came, arrival))
    return _settled(replace(state, open=(*state.open, here)))


def leave(state: GatheringState, worker: int) -> tuple[GatheringState, Outcomes]:
    """Note that a worker is gone, and refuse those who need it."""
    if worker not in state.present:
        return state, ()
    state = replace(state, present=state.present - {worker}, ended=(*state.ended, worker))
    return _settled(state)


def look(state: GatheringState, now: float) -> tuple[GatheringState, Outcomes]:
    """Refuse those who have waited too long."""
    outcomes: list[Complete | Refuse] = []
    for gathering in state.open:
        given_up = [one for one in gathering.came if now >= one.due_s]
        if given_up:
            state = state.without(gathering)
            outcomes.append(_too_late(gathering, given_up[0], state.present))
    return state, tuple(outcomes)


def _settled(state: GatheringState) -> tuple[GatheringState, Outcomes]:
    """End the gatherings that are complete, and those that can never be."""
    outcomes: list[Complete | Refuse] = []
    for gathering in state.open:
        if not gathering.missing:
            state = state.without(gathering)
            outcomes.append(Complete(gathering))
        elif _is_hopeless(gathering, state.present):
            state = state.without(gathering)
            outcomes.append(_lost(gathering, state))
    idle = state.present - state.waiting
    if state.open and all(len(idle) < len(gathering.missing) for gathering in state.open):
        outcomes.append(Refuse(state.waiting, Refused(_apart(state.open))))
        state = replace(state, open=())
    return state, tuple(outcomes)


def _is_hopeless(gathering: Gathering, present: frozenset[int]) -> bool:
    has_lost_one = not gathering.workers <= present
    return has_lost_one or len(present - gathering.workers) < len(gathering.missing)


def _why_not(here: Gathering, arrival: Arrival) -> str:
    """Say why a worker cannot be one of those who wait; empty if it can."""
    wanted = arrival.request
    if wanted.world_size != here.world_size:
        return (
            f"all ranks must come to `init_process_group` ({here.place}) with the same "
            f"`world_size`, but worker {here.came[0].worker} says {here.world_size} and worker "
            f"{arrival.worker} says {wanted.world_size}: pass "
            f'`world_size=int(os.environ["WORLD_SIZE"])`, or nothing.'
        )
    same = [other for other in here.came if other.request.rank == wanted.rank]
    if same:
        return (
            f"each rank must come to `init_process_group` ({here.place}) once, but workers "
            f"{same[0].worker} and {arrival.worker} both say that they are rank {wanted.rank}: "
            f'pass `rank=int(os.environ["RANK"])`, or nothing.'
        )
    return ""


def _lost(gathering: Gathering, state: GatheringState) -> Refuse:
    lost = state.ended[-1]
    reason = (
        f"all {gathering.world_size} ranks must come to `init_process_group` "
        f"({gathering.place}), but worker {lost} has ended, so that not all of them ever will: "
        f"make the same calls on every worker."
    )
    return Refuse(gathering.workers & state.present, Refused(reason, Why.LOST, lost))


def _apart(gatherings: Sequence[Gathering]) -> str:
    places = "; ".join(
        f"{listed('worker', sorted(g.workers))} at {g.place} for {g.world_size} ranks"
        for g in gatherings
    )
    return (
        f"all ranks of a group must come to `init_process_group` at one place, but they wait for "
        f"each other apart: {places}. Use the same `init_method` and `world_size` on every worker."
    )


def _too_late(gathering: Gathering, first: Arrival, present: frozenset[int]) -> Refuse:
    timeout_s = first.request.timeout_s
    reason = (
        f"all {gathering.world_size} ranks must come to `init_process_group` ({gathering.place}) "
        f"within its timeout of {timeout_s:.0f} s, but {_have_not(gathering)}: "
        f"{_advice(gathering, present)}"
    )
    late = Refused(reason, Why.LATE, missing=gathering.missing, waited_s=timeout_s)
    return Refuse(gathering.workers, late)


def _have_not(gathering: Gathering) -> str:
    have = "has" if len(gathering.missing) == 1 else "have"
    return f"{listed('rank', gathering.missing)} {have} not"


def _advice(gathering: Gathering, present: frozenset[int]) -> str:
    others = sorted(present - gathering.workers)
    do = "does" if len(others) == 1 else "do"
    return f"look what {listed('worker', others)} {do}; every rank must call it."
