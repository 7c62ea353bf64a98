"""Who goes on when a worker is lost, and who joins? (state, event) → decision, with its reason.

Pure: no process, clock or socket is touched here; ``supervise`` does what a decision says.

Workers that compute together are the *membership*. A lost one leaves it; the others notice at their
next meeting, stop, and hear who goes on. A replacement runs the program from its start, is told
what came of everything that the others have done together, and waits where it has caught up;
between two steps the membership stops for it::

    Lost ──► membership without it, replacement started ──► all have stopped ──► go on
    Asked (caught up) ──► wish to stop between two steps ──► all have stopped ──► joined

Invariant: nobody continues before every worker of the membership has stopped: all know the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.launch.job_events import (
    Action,
    Answer,
    Asked,
    Came,
    Event,
    GiveUp,
    Gone,
    Joined,
    KeepAndEnd,
    LoopBegan,
    Lost,
    MarkDeparture,
    Ready,
    Seat,
    Spawn,
    Stopped,
    StopWanted,
    Unready,
    Wish,
)
from unisono.workers.control_block import Departure
from unisono.workers.membership import Membership

PERIOD_S = 60.0
RESTARTS = 3
LOOP = "loop"


@dataclass(frozen=True, slots=True)
class SharedLoop:
    """The loop under way: its place in the history, and what whoever joins has to know."""

    index: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one thing done together; for a loop, with what was told when it began.

    A loop that was left before its end has led to nothing that could be taken over: no payload.
    """

    name: str
    payload: bytes
    loop: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """What is known about who computes.

    Attributes:
        membership: who computes together; None: nobody.
        generation: of the newest membership.
        restarts: how many workers may be lost within a minute.
        replaces: whether a lost worker is replaced; else the others go on without it.
        is_ready: whether a lost worker can be made up for at all.
        trouble: why it cannot any more.
        has_lost: somebody of the membership was lost, and the others have not gone on since.
        how_lost: how, in words, each of them.
        stopped: who of the membership stands still, and where.
        asking: the replacements that have caught up and wait, with what they asked.
        history: what came of everything done together so far.
        loop: the loop under way.
        losses: when workers were lost lately.
        is_wished: the membership has been asked to stop between two steps.
        is_ending: the job ends after the step under way.
    """

    membership: Membership | None
    generation: int = 0
    restarts: int = RESTARTS
    replaces: bool = True
    is_ready: bool = False
    trouble: str = ""
    has_lost: bool = False
    how_lost: tuple[str, ...] = ()
    stopped: Mapping[int, Stopped] = field(default_factory=dict)
    asking: Mapping[int, Asked] = field(default_factory=dict)
    history: tuple[Outcome, ...] = ()
    loop: SharedLoop | None = None
    losses: tuple[float, ...] = ()
    is_wished: bool = False
    is_ending: bool = False

    @property
    def can_stop_between_steps(self) -> bool:
        """Whether there are steps, and a place to keep what they have led to."""
        return bool(self.membership and self.loop and self.loop.facts.get("directory"))


@dataclass(frozen=True, slots=True)
class RecoveryDecision:
    """The new state, what to do now, and why, in words."""

    state: RecoveryState
    actions: tuple[Action, ...] = ()
    reason: str = ""


def start(world_size: int, *, restarts: int = RESTARTS, replaces: bool = True) -> RecoveryState:
    """Describe a job whose workers have just been asked for."""
    return RecoveryState(
        Membership(tuple(range(world_size)), leader=0), restarts=restarts, replaces=replaces
    )


def decide(state: RecoveryState, event: Event) -> RecoveryDecision:
    """Say what follows from `event`."""
    match event:
        case Ready():
            return RecoveryDecision(
                replace(state, is_ready=not state.trouble), (), "it can be run again"
            )
        case Unready(reason):
            refusals = tuple(_refused(asked, why=reason) for asked in state.asking.values())
            state = replace(state, is_ready=False, trouble=reason, asking={})
            return _settled(state, reason, refusals)
        case Lost():
            return _lost(state, event)
        case Gone(rank):
            return _settled(_without(state, rank), f"worker {rank} has nothing left to do")
        case Stopped():
            stopped = {**state.stopped, event.rank: event}
            return _settled(replace(state, stopped=stopped), f"worker {event.rank} stands still")
        case Asked():
            return _asked(state, event)
        case Came():
            return _came(state, event)
        case LoopBegan(index, facts):
            if state.loop is not None or index != len(state.history):
                return RecoveryDecision(state, (), "that is known")
            elsewhere = [asked for asked in state.asking.values() if asked.name != LOOP]
            asking = {rank: a for rank, a in state.asking.items() if a not in elsewhere}
            state = replace(state, loop=SharedLoop(index, facts), asking=asking)
            return _settled(state, "a loop has begun", tuple(map(_refused, elsewhere)))
        case StopWanted():
            return _settled(replace(state, is_ending=True), "asked to end after this step")


def _lost(state: RecoveryState, event: Lost) -> RecoveryDecision:
    losses = (*(at for at in state.losses if event.now - at < PERIOD_S), event.now)
    how_lost = (*state.how_lost, event.how) if event.how else state.how_lost
    state = _without(replace(state, losses=losses, how_lost=how_lost), event.rank)
    trouble = ""
    if not state.is_ready and event.had_begun:
        trouble = state.trouble or "the program had not made a `Run` or `Trainer` yet"
    elif len(losses) > state.restarts:
        trouble = (
            f"{len(losses)} worker{'s were' if len(losses) > 1 else ' was'} lost within "
            f"{PERIOD_S:.0f} s, more than `--restarts` or `restarts` ({state.restarts}) allows"
        )
    elif not state.replaces and state.membership is None:
        trouble = "it was the last worker, and `--no-replace` or `replace=False` allows no other"
    if trouble:
        return RecoveryDecision(state, (GiveUp(),), trouble)
    actions: tuple[Action, ...] = (MarkDeparture(event.rank, Departure.LOST),)
    if state.replaces:
        actions = (*actions, Spawn(event.rank))
    return _settled(state, f"worker {event.rank} was lost; the others go on", actions)


def _without(state: RecoveryState, rank: int) -> RecoveryState:
    """Take a worker out of all that is under way."""
    membership = state.membership
    if membership is not None and rank in membership.ranks:
        ranks = tuple(other for other in membership.ranks if other != rank)
        leader = membership.leader if membership.leader != rank else min(ranks, default=0)
        membership = Membership(ranks, leader, membership.generation) if ranks else None
        state = replace(state, has_lost=True)
    stopped = {other: stop for other, stop in state.stopped.items() if other != rank}
    asking = {other: asked for other, asked in state.asking.items() if other != rank}
    return replace(state, membership=membership, stopped=stopped, asking=asking)


def _asked(state: RecoveryState, event: Asked) -> RecoveryDecision:
    entry = _entry(state, event.index)
    if entry is not None:
        return RecoveryDecision(state, (_passed(event, entry),), "the others have been there")
    is_loop = state.loop is not None and event.index == state.loop.index
    if event.index > len(state.history) or (is_loop and event.name != LOOP):
        return RecoveryDecision(state, (_refused(event),), "it has come to another place")
    if state.trouble:
        return RecoveryDecision(state, (_refused(event, why=state.trouble),), state.trouble)
    asking = {**state.asking, event.rank: event}
    return _settled(replace(state, asking=asking), f"worker {event.rank} has caught up")


def _came(state: RecoveryState, event: Came) -> RecoveryDecision:
    if event.index != len(state.history):
        return RecoveryDecision(state, (), "that is known")
    is_loop = event.name == LOOP
    loop = state.loop.facts if is_loop and state.loop is not None else None
    entry = Outcome(event.name, event.payload, loop)
    waiting = [asked for asked in state.asking.values() if asked.index == event.index]
    asking = {rank: asked for rank, asked in state.asking.items() if asked not in waiting}
    state = replace(
        state,
        history=(*state.history, entry),
        loop=None if is_loop else state.loop,
        asking=asking,
    )
    answers: tuple[Action, ...] = tuple(_passed(asked, entry) for asked in waiting)
    if is_loop and state.is_ending:
        answers = (*answers, KeepAndEnd())
    return _settled(state, "the workers have done something together", answers)


def _settled(
    state: RecoveryState, reason: str, actions: tuple[Action, ...] = ()
) -> RecoveryDecision:
    """Let go on who can go on, and say whether the membership should stop."""
    membership = state.membership
    if membership is None and state.asking:
        state, more = _go_on_alone(state)
        actions = (*actions, *more)
    elif membership is not None and all(rank in state.stopped for rank in membership.ranks):
        state, more = _go_on(state, membership)
        actions = (*actions, *more)
    is_awaited = bool(state.asking) and state.is_ready
    is_wished = state.loop is not None and (state.is_ending or is_awaited)
    if is_wished != state.is_wished:
        state = replace(state, is_wished=is_wished)
        actions = (*actions, Wish(is_wished))
    return RecoveryDecision(state, actions, reason)


def _go_on_alone(state: RecoveryState) -> tuple[RecoveryState, tuple[Action, ...]]:
    """Let the first replacement that has caught up go on; the others will join it."""
    rank = min(state.asking)
    membership = Membership((rank,), rank, state.generation + 1, "; ".join(state.how_lost))
    asking = {other: asked for other, asked in state.asking.items() if other != rank}
    live = _live(rank, membership, state.loop, is_alone=True)
    state = replace(
        state,
        membership=membership,
        generation=membership.generation,
        asking=asking,
        stopped={},
        has_lost=False,
        how_lost=(),
    )
    return state, (Seat(rank, 0), live, Joined((rank,)))


def _go_on(
    state: RecoveryState, membership: Membership
) -> tuple[RecoveryState, tuple[Action, ...]]:
    stop = state.stopped[membership.ranks[0]]
    if stop.between_steps and state.is_ending:
        return replace(state, stopped={}), (KeepAndEnd(),)
    # Not after a loss that is not dealt with yet: the run may have to go back first.
    may_join = (
        stop.between_steps and state.loop is not None and state.is_ready and not state.has_lost
    )
    joining = sorted(state.asking) if may_join else []
    ranks = tuple(sorted((*membership.ranks, *joining)))
    new = Membership(ranks, membership.leader, state.generation + 1, "; ".join(state.how_lost))
    answers = [
        Answer(rank, {"type": "go", "membership": new.as_json()}) for rank in membership.ranks
    ]
    # Before anybody goes on: the seat still shows to how many meetings its last owner came.
    seats = [Seat(rank, stop.arrivals) for rank in joining]
    lives = [_live(rank, new, state.loop, is_alone=False) for rank in joining]
    told = [Joined(tuple(joining))] if joining else []
    asking = {rank: asked for rank, asked in state.asking.items() if rank not in joining}
    state = replace(
        state,
        membership=new,
        generation=new.generation,
        stopped={},
        asking=asking,
        has_lost=False,
        how_lost=(),
    )
    return state, (*seats, *answers, *lives, *told)


def _entry(state: RecoveryState, index: int) -> Outcome | None:
    return state.history[index] if index < len(state.history) else None


def _passed(asked: Asked, entry: Outcome) -> Answer:
    if asked.name != entry.name or (entry.name == LOOP and not entry.payload):
        return _refused(asked, entry)
    loop = None if entry.loop is None else dict(entry.loop)
    return Answer(asked.rank, {"type": "passed", "loop": loop}, entry.payload)


def _refused(asked: Asked, entry: Outcome | None = None, why: str = "") -> Answer:
    seen = "another place" if entry is None else f"`{entry.name}`"
    reason = (
        f"a program must do the same when it is run again, so that a replacement can catch up, but "
        f"worker {asked.rank} came to `{asked.name}` where the others had come to {seen}: keep "
        f"what decides over the program's course the same, or use `--no-replace` or "
        f"`replace=False`."
    )
    if entry is not None and entry.name == asked.name:
        why = "the others left a loop in the midst of a step"
    if why:
        reason = f"a replacement must be able to catch up, but cannot any more: {why}."
    return Answer(asked.rank, {"type": "refused", "reason": reason})


def _live(rank: int, membership: Membership, loop: SharedLoop | None, *, is_alone: bool) -> Answer:
    header = {
        "type": "live",
        "membership": membership.as_json(),
        "loop": None if loop is None else dict(loop.facts),
        "is_alone": is_alone,
    }
    return Answer(rank, header)
