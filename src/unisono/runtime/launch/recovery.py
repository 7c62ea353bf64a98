"""Who continues when a worker is lost, and who joins? (state, event) → decision.

Pure: uses no process, clock or socket. Each event is a function, which ``request_handler`` calls.

Workers that compute together are the *membership*. A lost worker leaves it; the others notice at
their next barrier, stop, and learn who continues. A replacement runs the program from its start,
gets the outcomes of the others' replicated calls, and waits once it has caught up. The membership
stops for it between two steps::

    lost ──► membership without it, replacement started ──► all have stopped ──► continue
    CatchUp (caught up) ──► wish to stop between two steps ──► all have stopped ──► joined

On several hosts a loss makes every launcher kill all of its workers and start them again; they
continue once all have caught up.

Invariant: no worker continues before every worker of the membership has stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from unisono.runtime.workers.launcher_messages import (
    LOOP,
    CatchUp,
    Continue,
    Live,
    LoopBegan,
    NoRecovery,
    Passed,
    Ready,
    Refused,
    ReplicatedResult,
    Stopped,
    ToWorker,
)
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.membership import Membership

PERIOD_S = 60.0
RESTARTS = 3

# Messages of workers that affect the membership.
OfRecovery = Ready | NoRecovery | Stopped | CatchUp | ReplicatedResult | LoopBegan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one replicated call; for a loop, with its facts when it began."""

    name: str
    payload: bytes
    loop: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """Which workers compute, and what they wait for."""

    membership: Membership | None  # the workers that compute together; None: there are none
    generation: int = 0  # of the newest membership
    restarts: int = RESTARTS  # how many workers may be lost within a minute
    replaces: bool = True  # whether a lost worker is replaced, or the others continue without it
    world_size: int = 0  # the number of workers
    first_rank: int | None = None  # with several hosts: the rank of this host's first worker
    gone: frozenset[int] = frozenset()  # workers that have nothing left to do
    is_ready: bool = False  # whether the job can recover from a lost worker at all
    trouble: str = ""  # why it no longer can
    # a member was lost, and the others have not continued since
    has_lost: bool = False
    how_lost: tuple[str, ...] = ()  # descriptions of how those members were lost
    # the members that have stopped, and where
    stopped: Mapping[int, Stopped] = field(default_factory=dict)
    # the replacements that have caught up and wait, with their requests
    asking: Mapping[int, CatchUp] = field(default_factory=dict)
    history: tuple[Outcome, ...] = ()  # the outcomes of all replicated calls so far
    loop: LoopBegan | None = None  # the current loop
    losses: tuple[float, ...] = ()  # when workers were lost recently
    is_wished: bool = False  # the membership has been asked to stop between two steps
    is_ending: bool = False  # the job ends after the current step

    @property
    def can_stop_between_steps(self) -> bool:
        """Whether there are steps, and a directory to store their result."""
        facts = self.loop.facts if self.loop is not None else {}
        return bool(self.membership and facts.get("directory"))

    @property
    def can_stop_later(self) -> bool:
        """Whether this is between two loops, and the last loop's end is stored on the disk."""
        ended = (one.loop for one in reversed(self.history) if one.loop is not None)
        is_kept = bool(next(ended, {}).get("directory"))
        return bool(self.membership and self.loop is None and self.first_rank is None and is_kept)


@dataclass(frozen=True, slots=True)
class RecoveryDecision:
    """The new state, and what to do now."""

    state: RecoveryState
    actions: tuple[Action, ...] = ()
    trouble: str = ""  # why a loss ends the job; empty if it does not


def gone(state: RecoveryState, rank: int) -> RecoveryDecision:
    """Handle a worker that takes no further part: its program has ended, or it has left."""
    state = replace(_without(state, rank), gone=state.gone | {rank})
    return _settled(state)


def stop_wanted(state: RecoveryState) -> RecoveryDecision:
    """Handle a request to end the job after the current step."""
    return _settled(replace(state, is_ending=True))


def received(state: RecoveryState, rank: int, message: OfRecovery) -> RecoveryDecision:
    """Handle a message from a worker."""
    match message:
        case Ready():
            return RecoveryDecision(replace(state, is_ready=not state.trouble))
        case NoRecovery(reason):
            refusals = _refusals(state.asking, why=reason)
            state = replace(state, is_ready=False, trouble=reason, asking={})
            return _settled(state, refusals)
        case Stopped(between_steps=False) if state.first_rank is not None:
            return _start_again(state)  # a worker of another host was lost
        case Stopped():
            return _settled(replace(state, stopped={**state.stopped, rank: message}))
        case CatchUp():
            return _requested(state, rank, message)
        case ReplicatedResult():
            return _came(state, message)
        case LoopBegan(index):
            if state.loop is not None or index != len(state.history):
                return RecoveryDecision(state)
            elsewhere = {r: asked for r, asked in state.asking.items() if asked.name != LOOP}
            state = replace(state, loop=message, asking=_but(state.asking, elsewhere))
            return _settled(state, _refusals(elsewhere))


def lost(
    state: RecoveryState, rank: int, now: float, *, had_begun: bool = True, how: str = ""
) -> RecoveryDecision:
    """Handle a lost worker (`how`: in words); one that had not begun can always be rerun."""
    losses = (*(at for at in state.losses if now - at < PERIOD_S), now)
    how_lost = (*state.how_lost, how) if how else state.how_lost
    state = replace(state, losses=losses, how_lost=how_lost)
    if state.first_rank is None:
        state = _without(state, rank)
    trouble = ""
    if not state.is_ready and had_begun:
        trouble = state.trouble or "the program had not made a `Run` or `Trainer` yet"
    elif len(losses) > state.restarts:
        trouble = (
            f"{len(losses)} worker{'s were' if len(losses) > 1 else ' was'} lost within "
            f"{PERIOD_S:.0f} s, more than `--restarts` or `restarts` ({state.restarts}) allows"
        )
    elif not state.replaces and state.membership is None:
        trouble = "it was the last worker, and `--no-replace` or `replace=False` allows no other"
    if trouble:
        return RecoveryDecision(state, trouble=trouble)
    if state.first_rank is not None:
        return _start_again(state, rank)
    actions: tuple[Action, ...] = (MarkDeparture(rank, Departure.LOST),)
    if state.replaces:
        actions = (*actions, Spawn(rank))
    return _settled(state, actions)


def _start_again(state: RecoveryState, lost: int | None = None) -> RecoveryDecision:
    state = replace(state, stopped={}, asking={}, how_lost=())
    return RecoveryDecision(state, (StartAgain(lost),))


def _without(state: RecoveryState, rank: int) -> RecoveryState:
    membership = state.membership
    if membership is not None and rank in membership.ranks:
        ranks = tuple(other for other in membership.ranks if other != rank)
        leader = membership.leader if membership.leader != rank else min(ranks, default=0)
        membership = Membership(ranks, leader, membership.generation) if ranks else None
        state = replace(state, has_lost=True)
    return replace(
        state,
        membership=membership,
        stopped=_but(state.stopped, (rank,)),
        asking=_but(state.asking, (rank,)),
    )


def _requested(state: RecoveryState, rank: int, asked: CatchUp) -> RecoveryDecision:
    if asked.index < len(state.history):
        return RecoveryDecision(state, (_answer(rank, asked, state.history[asked.index]),))
    is_loop = state.loop is not None and asked.index == state.loop.index
    if asked.index > len(state.history) or (is_loop and asked.name != LOOP):
        return RecoveryDecision(state, _refusals({rank: asked}))
    if state.trouble:
        return RecoveryDecision(state, _refusals({rank: asked}, why=state.trouble))
    return _settled(replace(state, asking={**state.asking, rank: asked}))


def _came(state: RecoveryState, result: ReplicatedResult) -> RecoveryDecision:
    if result.index != len(state.history):
        return RecoveryDecision(state)
    is_loop = result.name == LOOP
    loop = state.loop.facts if is_loop and state.loop is not None else None
    outcome = Outcome(result.name, result.payload, loop)
    waiting = {rank: asked for rank, asked in state.asking.items() if asked.index == result.index}
    state = replace(
        state,
        history=(*state.history, outcome),
        loop=None if is_loop else state.loop,
        asking=_but(state.asking, waiting),
    )
    actions: tuple[Action, ...] = tuple(_answer(rank, waiting[rank], outcome) for rank in waiting)
    if state.is_ending:
        actions = (*actions, KeepAndEnd())
    return _settled(state, actions)


def _settled(state: RecoveryState, actions: tuple[Action, ...] = ()) -> RecoveryDecision:
    """Answer workers that can continue, and decide whether the membership should stop."""
    membership = state.membership
    if state.first_rank is not None:
        state, more = _of_hosts(state)
        return RecoveryDecision(state, (*actions, *more))
    if membership is None and state.asking:
        # The first worker that has caught up; the others will join it.
        first = min(state.asking)
        state, more = _form_membership(state, (), (first,), leader=first)
        actions = (*actions, *more)
    elif membership is not None and all(rank in state.stopped for rank in membership.ranks):
        state, more = _resume(state, membership)
        actions = (*actions, *more)
    is_awaited = bool(state.asking) and state.is_ready
    is_wished = state.loop is not None and (state.is_ending or is_awaited)
    if is_wished != state.is_wished:
        state = replace(state, is_wished=is_wished)
        actions = (*actions, Wish(is_wished))
    return RecoveryDecision(state, actions)


def _of_hosts(state: RecoveryState) -> tuple[RecoveryState, tuple[Action, ...]]:
    """On one of several hosts, let workers continue once all have caught up."""
    if state.is_ending and len(state.stopped) == state.world_size:
        return replace(state, stopped={}), (KeepAndEnd(),)
    actions: tuple[Action, ...] = ()
    ranks = state.asking.keys()
    if ranks and len(ranks | state.gone) == state.world_size:
        state, actions = _form_membership(state, (), ranks, leader=min(ranks))
    if state.is_ending and not state.is_wished:
        return replace(state, is_wished=True), (*actions, Wish(value=True))
    return state, actions


def _resume(
    state: RecoveryState, membership: Membership
) -> tuple[RecoveryState, tuple[Action, ...]]:
    stop = state.stopped[membership.ranks[0]]
    if stop.between_steps and state.is_ending:
        return replace(state, stopped={}), (KeepAndEnd(),)
    # Not after a loss that has not been handled yet: the run may have to go back first.
    may_join = (
        stop.between_steps and state.loop is not None and state.is_ready and not state.has_lost
    )
    joining = state.asking if may_join else ()
    return _form_membership(state, membership.ranks, joining, leader=membership.leader, stop=stop)


def _form_membership(
    state: RecoveryState,
    waiting: Collection[int],
    joining: Collection[int],
    *,
    leader: int,
    stop: Stopped | None = None,
) -> tuple[RecoveryState, tuple[Action, ...]]:
    """Form a new membership; if no `stop` is given, memory that they share may be inconsistent."""
    generation, loop, ranks = state.generation + 1, state.loop, tuple(sorted((*waiting, *joining)))
    joining = tuple(sorted(joining))
    new = Membership(ranks, leader, generation, "; ".join(state.how_lost))
    state = replace(
        state,
        membership=new,
        generation=generation,
        stopped={},
        asking=_but(state.asking, ranks),
        has_lost=False,
        how_lost=(),
    )
    live = Live(new, None if loop is None else loop.facts, is_alone=stop is None)
    return state, (
        # Before others continue: the seat still has its last owner's number of arrivals.
        *(Seat(rank, 0 if stop is None else stop.arrivals) for rank in joining),
        *(Answer(rank, Continue(new)) for rank in sorted(waiting)),
        *(Answer(rank, live) for rank in joining),
        *([Joined(joining)] if joining else ()),
    )


def _but(of_ranks: Mapping[int, T], without: Collection[int]) -> dict[int, T]:
    return {rank: value for rank, value in of_ranks.items() if rank not in without}


def _answer(rank: int, asked: CatchUp, outcome: Outcome) -> Answer:
    if asked.name == outcome.name and outcome.name == LOOP and not outcome.payload:
        return _refused(rank, asked, why="the others left a loop in the middle of a step")
    if asked.name != outcome.name:
        return _refused(rank, asked, seen=f"`{outcome.name}`")
    return Answer(rank, Passed(outcome.payload, outcome.loop))


def _refusals(asking: Mapping[int, CatchUp], why: str = "") -> tuple[Answer, ...]:
    return tuple(_refused(rank, asked, why=why) for rank, asked in asking.items())


def _refused(rank: int, asked: CatchUp, *, seen: str = "another place", why: str = "") -> Answer:
    reason = (
        f"a program must do the same when it is run again, so that a replacement can catch up, but "
        f"worker {rank} came to `{asked.name}` where the others had come to {seen}: keep what "
        f"decides over the program's course the same, or use `--no-replace` or `replace=False`."
    )
    if why:
        reason = f"a replacement must be able to catch up, but cannot any more: {why}."
    return Answer(rank, Refused(reason))


@dataclass(frozen=True, slots=True)
class MarkDeparture:
    """Record on the control block whether this worker may still arrive."""

    rank: int
    how: Departure


@dataclass(frozen=True, slots=True)
class Seat:
    """Record on the control block that a replacement has made as many arrivals as the others."""

    rank: int
    arrivals: int


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a replacement."""

    rank: int


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Kill all workers that have not finished, and start them again, with the lost one."""

    lost: int | None  # None: it is on another host


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a worker's pending request."""

    rank: int
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Wish:
    """Publish on the control block whether all workers should stop between two steps."""

    value: bool


@dataclass(frozen=True, slots=True)
class Joined:
    """Report that replacements have joined the membership."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeepAndEnd:
    """Write a checkpoint, then end the job: all workers have stopped between two steps."""


Action = MarkDeparture | Seat | Spawn | StartAgain | Answer | Wish | Joined | KeepAndEnd
