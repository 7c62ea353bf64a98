"""Who goes on and who joins, by tables and by random histories; no process is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.promises import promise

from unisono.runtime.launch import recovery
from unisono.runtime.launch.recovery import (
    PERIOD_S,
    Action,
    Answer,
    Joined,
    KeepAndEnd,
    MarkDeparture,
    OfRecovery,
    RecoveryDecision,
    RecoveryState,
    Seat,
    Spawn,
    StartAgain,
    Wish,
    stop_wanted,
)
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
)
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.membership import Membership

Event = Callable[[RecoveryState], RecoveryDecision]
RESULT = "result"
FACTS = {"shards": 8, "key": 1, "directory": None}
KEPT = {**FACTS, "directory": "runs/1"}


@dataclass(frozen=True)
class Said:
    rank: int
    message: OfRecovery

    def __call__(self, state: RecoveryState) -> RecoveryDecision:
        return recovery.received(state, self.rank, self.message)


READY = Said(0, Ready())


def start(world_size: int, **options: Any) -> RecoveryState:
    return RecoveryState(Membership.of(world_size), world_size=world_size, **options)


def gone(rank: int) -> Event:
    return partial(recovery.gone, rank=rank)


def lost_at(rank: int, now: float, **how: Any) -> Event:
    return partial(recovery.lost, rank=rank, now=now, **how)


def unready(reason: str) -> Said:
    return Said(0, NoRecovery(reason))


def ask(rank: int, index: int, name: str) -> Said:
    return Said(rank, CatchUp(index, name))


def result(index: int, name: str, payload: bytes) -> Said:
    return Said(0, ReplicatedResult(index, name, payload))


def began(index: int, facts: Mapping[str, Any]) -> Said:
    return Said(0, LoopBegan(index, facts))


AGREED, LOOP_BEGAN = result(0, RESULT, b"agreed"), began(1, FACTS)
LOOP_ENDED = result(1, LOOP, b"step 90")


def decisions(*events: Event, workers: int = 3, **options: Any) -> list[RecoveryDecision]:
    """Decide about one event after the other, in a job whose program can be run again."""
    made = [READY(start(workers, **options))]
    for event in events:
        made.append(event(made[-1].state))
    return made


def after(*events: Event, workers: int = 3, **options: Any) -> RecoveryDecision:
    return decisions(*events, workers=workers, **options)[-1]


def lost(*ranks: int) -> tuple[Event, ...]:
    return tuple(lost_at(rank, float(rank)) for rank in ranks)


def stopped(*ranks: int, arrivals: int = 7, between_steps: bool = False) -> tuple[Said, ...]:
    return tuple(Said(rank, Stopped(arrivals, between_steps)) for rank in ranks)


def paused(*ranks: int, arrivals: int = 7) -> tuple[Said, ...]:
    return stopped(*ranks, arrivals=arrivals, between_steps=True)


def go(membership: Membership, *ranks: int) -> tuple[Answer, ...]:
    return tuple(Answer(rank, Continue(membership)) for rank in ranks or membership.ranks)


def live(rank: int, membership: Membership, loop: Any, *, is_alone: bool = False) -> Answer:
    return Answer(rank, Live(membership, loop, is_alone))


def passed(rank: int, payload: bytes, loop: Mapping[str, Any] | None = None) -> Answer:
    return Answer(rank, Passed(payload, loop))


def reason_of(answer: Action) -> str:
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)
    return answer.message.reason


def types_of(decision: RecoveryDecision) -> list[tuple[int, str]]:
    return [
        (action.rank, type(action.message).__name__)
        for action in decision.actions
        if isinstance(action, Answer)
    ]


# A worker is lost.


@pytest.mark.parametrize(
    ("workers", "ranks", "membership"),
    [
        (3, (2,), Membership((0, 1), leader=0)),
        (3, (1,), Membership((0, 2), leader=0)),
        (3, (0,), Membership((1, 2), leader=1)),  # the leader changes only when it was lost
        (3, (0, 1), Membership((2,), leader=2)),
        (3, (1, 0), Membership((2,), leader=2)),
        (4, (0, 2, 1), Membership((3,), leader=3)),
        (3, (0, 1, 2), None),
        (1, (0,), None),
    ],
)
def test_the_crew_goes_on_without_lost_workers(
    workers: int, ranks: tuple[int, ...], membership: Membership | None
) -> None:
    decision = after(*lost(*ranks), workers=workers)
    assert decision.state.membership == membership
    assert decision.actions == (MarkDeparture(ranks[-1], Departure.LOST), Spawn(ranks[-1]))


def test_without_replacements_a_lost_worker_is_marked_and_nobody_is_started() -> None:
    assert after(*lost(1), replaces=False).actions == (MarkDeparture(1, Departure.LOST),)


@promise("where-it-ends.2", "where-it-ends.3")
@pytest.mark.parametrize(
    ("events", "options", "reason"),
    [
        (lost(0), {}, ""),
        ((unready("no schedule is kept"), *lost(0)), {}, "no schedule is kept"),
        ((unready("why"), READY, *lost(0)), {}, "why"),  # what cannot be cannot be again
        (lost(0, 1), {"restarts": 2}, ""),
        (
            lost(0, 1),
            {"restarts": 1},
            "2 workers were lost within 60 s, more than `--restarts` or `restarts` (1) allows",
        ),
        (
            lost(0),
            {"restarts": 0},
            "1 worker was lost within 60 s, more than `--restarts` or `restarts` (0) allows",
        ),
        ((lost_at(0, 0.0), lost_at(0, PERIOD_S)), {"restarts": 1}, ""),
        ((lost_at(0, 0.0), lost_at(0, PERIOD_S - 0.1)), {"restarts": 1}, "2 workers were lost"),
        (lost(0, 1), {"replaces": False}, ""),
        (
            lost(0, 1, 2),
            {"replaces": False},
            "it was the last worker, and `--no-replace` or `replace=False` allows",
        ),
        (lost(0, 1, 2), {"replaces": True}, ""),
    ],
)
def test_a_loss_ends_the_job_only_for_a_reason(
    events: tuple[Event, ...], options: dict[str, Any], reason: str
) -> None:
    decision = after(*events, **options)
    assert bool(decision.actions) != bool(reason)
    assert reason in decision.trouble


def test_a_program_that_had_not_begun_can_always_be_run() -> None:
    actions = (MarkDeparture(1, Departure.LOST), Spawn(1))
    assert lost_at(1, 0.0, had_begun=False)(start(2)).actions == actions
    assert after(unready("why"), lost_at(1, 0.0, had_begun=False)).actions == actions
    too_often = lost_at(1, 0.0, had_begun=False)(start(2, restarts=0))
    assert too_often.trouble


# All who compute together stop, and go on.


# A replacement asks what the others have done.

RUNNING = (AGREED, LOOP_BEGAN, *lost(2), *stopped(0, 1))


@pytest.mark.parametrize(
    ("events", "asked", "answer"),
    [
        (RUNNING, ask(2, 0, RESULT), passed(2, b"agreed")),
        ((AGREED, *lost(2)), ask(2, 0, RESULT), passed(2, b"agreed")),
        ((*RUNNING, LOOP_ENDED), ask(2, 1, LOOP), passed(2, b"step 90", FACTS)),
        ((*RUNNING, LOOP_ENDED, result(2, RESULT, b"")), ask(2, 2, RESULT), passed(2, b"")),
    ],
)
def test_what_is_past_is_told_at_once(
    events: tuple[Event, ...], asked: Said, answer: Answer
) -> None:
    before, decision = decisions(*events, asked)[-2:]
    assert decision.actions == (answer,)
    assert decision.state == before.state


@promise("conditions.2")
@pytest.mark.parametrize(
    ("events", "asked"),
    [
        ((AGREED, *lost(2)), ask(2, 0, LOOP)),  # the others agreed
        ((*RUNNING, LOOP_ENDED), ask(2, 1, RESULT)),  # the others had a loop
        (RUNNING, ask(2, 1, RESULT)),  # they have one now
        (RUNNING, ask(2, 2, RESULT)),  # it has gone past the others
        ((AGREED, *lost(2)), ask(2, 2, LOOP)),
    ],
)
def test_a_program_that_takes_another_course_is_refused(
    events: tuple[Event, ...], asked: Said
) -> None:
    decision = after(*events, asked)
    assert types_of(decision) == [(2, "Refused")]
    (answer,) = decision.actions
    assert isinstance(asked.message, CatchUp)
    name = asked.message.name
    assert f"worker 2 came to `{name}` where the others had come to" in reason_of(answer)
    assert decision.state.asking == {}


@pytest.mark.parametrize(
    ("asked", "came", "answers"),
    [
        ([ask(1, 0, RESULT)], AGREED, [(1, "Passed")]),
        ([ask(1, 0, RESULT), ask(2, 0, RESULT)], AGREED, [(1, "Passed"), (2, "Passed")]),
        ([ask(1, 0, RESULT), ask(2, 0, LOOP)], AGREED, [(1, "Passed"), (2, "Refused")]),
        ([ask(1, 0, LOOP)], AGREED, [(1, "Refused")]),
    ],
)
def test_who_waits_for_something_hears_what_came_of_it(
    asked: list[Said], came: Said, answers: list[tuple[int, str]]
) -> None:
    decision = after(*lost(1, 2), *asked, came)
    assert types_of(decision) == answers
    assert decision.state.asking == {}


def test_who_waits_for_a_loop_that_ends_first_hears_where_it_ended() -> None:
    decision = after(*RUNNING, ask(2, 1, LOOP), LOOP_ENDED)
    assert decision.actions == (passed(2, b"step 90", FACTS), Wish(False))
    assert decision.state.loop is None


@pytest.mark.parametrize(
    ("events", "again"),
    [
        ((AGREED,), result(0, RESULT, b"agreed")),
        ((AGREED, LOOP_BEGAN), began(1, FACTS)),
        ((AGREED, LOOP_BEGAN, LOOP_ENDED), LOOP_ENDED),
        ((AGREED, LOOP_BEGAN, LOOP_ENDED), began(1, FACTS)),  # from a slow worker
        ((AGREED, LOOP_BEGAN), result(0, RESULT, b"agreed")),
    ],
)
def test_what_every_worker_tells_is_noted_once(events: tuple[Event, ...], again: Event) -> None:
    state = after(*events).state
    assert again(state) == RecoveryDecision(state)


# A replacement joins.


def test_it_joins_between_two_steps_when_all_have_stopped() -> None:
    decision = after(*RUNNING, ask(2, 1, LOOP), *paused(0, 1, arrivals=9))
    membership = Membership((0, 1, 2), 0, 2)
    assert decision.actions == (
        Seat(2, 9),  # before anybody goes on
        *go(membership, 0, 1),
        live(2, membership, FACTS),
        Joined((2,)),
        Wish(False),
    )
    assert decision.state.membership == membership
    assert decision.state.asking == {}


def test_in_the_midst_of_a_step_nobody_joins() -> None:
    events = (*RUNNING, ask(2, 1, LOOP), *lost(1), *stopped(0))
    decision = after(*events)
    assert decision.actions == go(Membership((0,), 0, 2))
    assert list(decision.state.asking) == [2]
    assert decision.state.is_wished


def test_nobody_joins_before_the_crew_has_come_to_terms_with_a_loss() -> None:
    # Some stood at the pause already: what the lost one has left may have to be put right first.
    events = (*RUNNING, ask(2, 1, LOOP), *paused(0), *lost(1), *paused(0))
    *_, at_the_loss, at_the_next_pause = decisions(*events)
    assert types_of(at_the_loss) == [(0, "Continue")]
    assert at_the_loss.state.is_wished
    assert types_of(at_the_next_pause) == [(0, "Continue"), (2, "Live")]


def test_a_loop_that_was_left_makes_room_for_the_next_and_is_not_taken_over() -> None:
    left = (unready("a loop was left before its end"), result(1, LOOP, b""))
    again = after(*RUNNING, *left, began(2, {"shards": 1})).state
    assert again.loop == LoopBegan(2, {"shards": 1})
    (answer,) = after(*RUNNING, *left, ask(2, 1, LOOP)).actions
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)


def test_who_cannot_catch_up_any_more_is_refused() -> None:
    trouble = unready("one loop over steps runs inside of another")
    assert types_of(after(*RUNNING, trouble, ask(2, 1, LOOP))) == [(2, "Refused")]
    told = after(*RUNNING, ask(2, 1, LOOP), trouble)
    assert types_of(told) == [(2, "Refused")]
    assert Wish(False) in told.actions
    assert after(*RUNNING, ask(2, 1, LOOP), trouble, *paused(0, 1)).actions == go(
        Membership((0, 1), 0, 2)
    )


def test_who_asks_for_an_outcome_does_not_join_a_loop() -> None:
    waiting = (AGREED, *lost(2), *stopped(0, 1), ask(2, 1, RESULT))
    assert types_of(after(*waiting, LOOP_BEGAN)) == [(2, "Refused")]
    assert after(*waiting, LOOP_BEGAN, *paused(0, 1)).state.membership == Membership((0, 1), 0, 2)


def test_the_lead_stays_when_another_is_lost_even_where_a_lower_rank_is_back() -> None:
    events = (AGREED, LOOP_BEGAN, *lost(0), *stopped(1, 2), ask(0, 1, LOOP), *paused(1, 2))
    assert after(*events, lost_at(2, 2.0)).state.membership == Membership((0, 1), 1, 2)


# Nobody is left.


@pytest.mark.parametrize(
    ("events", "loop", "wish"),
    [
        ((AGREED,), None, ()),
        ((AGREED, LOOP_BEGAN), FACTS, ()),
        ((AGREED, LOOP_BEGAN, LOOP_ENDED, result(2, RESULT, b"")), None, ()),
    ],
)
def test_the_first_that_has_caught_up_goes_on_alone(
    events: tuple[Event, ...], loop: Any, wish: tuple[Action, ...]
) -> None:
    state = after(*events, *lost(0, 1, 2)).state
    decision = ask(1, len(state.history), LOOP)(state)
    membership = Membership((1,), 1, 1)
    assert decision.actions == (
        Seat(1, 0),
        live(1, membership, loop, is_alone=True),
        Joined((1,)),
        *wish,
    )
    assert decision.state.membership == membership


# There are other hosts.


@promise("where-it-ends.9")
@pytest.mark.parametrize(
    ("event", "who"),
    [(lost_at(1, 0.0), 1), (stopped(0)[0], None)],  # None: a worker of another host misses one
)
def test_on_one_of_several_hosts_a_loss_makes_all_start_again(
    event: Event, who: int | None
) -> None:
    decision = after(AGREED, ask(1, 1, RESULT), event, workers=2, first_rank=4)
    assert decision.actions == (StartAgain(who),)
    assert decision.state.membership == Membership.of(2)
    assert not decision.state.asking
    assert len(decision.state.losses) == (who is not None)


@promise("where-it-ends.9")
@pytest.mark.parametrize(
    "events",
    [
        (*lost(1), ask(1, 0, RESULT), ask(0, 0, RESULT)),
        (AGREED, *stopped(0, 1), ask(0, 1, LOOP), ask(1, 1, LOOP)),
        # One is lost while they start again.
        (*lost(1), ask(1, 0, RESULT), *lost(0), ask(1, 0, RESULT), ask(0, 0, RESULT)),
        (AGREED, LOOP_BEGAN, *lost(1), ask(0, 1, LOOP), ask(1, 1, LOOP)),
    ],
)
def test_on_one_of_several_hosts_nobody_continues_before_all_have_caught_up(
    events: tuple[Event, ...],
) -> None:
    *before, last = decisions(*events, workers=2, restarts=9, first_rank=4)
    assert not [types_of(decision) for decision in before if types_of(decision)]
    membership = Membership((0, 1), 0, 1)
    loop = FACTS if LOOP_BEGAN in events else None
    assert last.actions == (
        *(Seat(rank, 0) for rank in (0, 1)),
        *(live(rank, membership, loop, is_alone=True) for rank in (0, 1)),
        Joined((0, 1)),
    )
    assert not last.state.is_wished


def test_on_one_of_several_hosts_too_many_losses_end_the_job() -> None:
    *_, first, second = decisions(AGREED, *lost(1, 0), workers=2, restarts=1, first_rank=4)
    assert first.actions == (StartAgain(1),)
    assert not second.actions
    assert "2 workers were lost within 60 s" in second.trouble


def test_on_one_of_several_hosts_who_has_finished_is_not_waited_for() -> None:
    events = (AGREED, gone(0), *lost(1), ask(1, 1, RESULT))
    decision = after(*events, workers=2, first_rank=4)
    assert types_of(decision) == [(1, "Live")]


# Somebody wants the job to end.


def test_one_of_several_hosts_ends_once_all_its_workers_stand_still() -> None:
    events = (AGREED, began(1, KEPT), stop_wanted, *paused(0), *paused(1))
    found = decisions(*events, workers=2, first_rank=4)
    *_, began_it, asked, first, last = found
    assert began_it.state.can_stop_between_steps
    assert [one.actions for one in (asked, first, last)] == [(Wish(True),), (), (KeepAndEnd(),)]


@pytest.mark.parametrize(
    ("events", "can"),
    [
        ((), False),
        ((began(0, FACTS),), False),  # nothing is kept anywhere
        ((began(0, KEPT),), True),
        ((began(0, KEPT), result(0, LOOP, b"")), False),
        ((began(0, KEPT), *lost(0, 1)), True),
        ((began(0, KEPT), *lost(0, 1, 2)), False),  # nobody is there to stop
    ],
)
def test_a_job_can_stop_between_steps_where_there_are_some_and_a_place_for_them(
    events: tuple[Event, ...], can: bool
) -> None:
    assert after(*events).state.can_stop_between_steps is can


STOPPING = (began(0, KEPT), stop_wanted)


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        (STOPPING, (Wish(True),)),
        ((*STOPPING, *paused(0, 1)), ()),
        ((*STOPPING, *paused(0, 1, 2)), (KeepAndEnd(),)),
        ((*STOPPING, result(0, LOOP, b"")), (KeepAndEnd(), Wish(False))),
        ((*STOPPING, *lost(2), *stopped(0, 1)), go(Membership((0, 1), 0, 1))),
        (
            (*STOPPING, *paused(0, 1), *lost(2)),
            (MarkDeparture(2, Departure.LOST), Spawn(2), KeepAndEnd()),
        ),
        ((*STOPPING, *lost(2), ask(2, 0, LOOP), *paused(0, 1)), (KeepAndEnd(),)),
    ],
)
def test_a_job_that_is_to_end_does_so_between_two_steps_or_after_the_last(
    events: tuple[Event, ...], actions: tuple[Action, ...]
) -> None:
    assert after(*events).actions == actions


# Whatever happens, in whatever order.


@dataclass
class Worker:
    """A worker of a random history."""

    in_membership: bool = True
    is_gone: bool = False
    waits: bool = False
    stop: Stopped | None = None
    index: int = 0


@dataclass
class World:
    """A launcher that believes `recovery`, and workers that do what they may at that moment."""

    state: RecoveryState
    workers: dict[int, Worker]
    generations: list[int] = field(default_factory=lambda: [0])
    has_ended: bool = False

    def take(self, event: Event) -> None:
        decision = event(self.state)
        self.state = decision.state
        told = {rank for action in decision.actions for rank in self.act(action)}
        assert not told or self.state.membership is not None
        assert not told or told == set(self.state.membership.ranks), (
            "all of a new membership are told at once"
        )
        self.check()

    def act(self, action: Action) -> set[int]:
        """Do it; list who has been told to go on."""
        match action:
            case Answer(rank, message):
                worker = self.workers[rank]
                assert worker.waits, "nobody is answered who does not wait"
                worker.waits = False
                if isinstance(message, Passed):
                    worker.index += 1
                    return set()
                assert isinstance(message, Live if worker.stop is None else Continue)
                assert rank in message.membership.ranks
                worker.in_membership, worker.stop = True, None
                return {rank}
            case Spawn(rank):
                self.workers[rank] = Worker(in_membership=False)
            case KeepAndEnd():
                self.has_ended = True
        return set()

    def check(self) -> None:
        state = self.state
        ranks = set(state.membership.ranks) if state.membership is not None else set()
        assert not ranks & set(state.asking), "nobody both belongs to the membership and asks to"
        assert set(state.stopped) <= ranks
        assert state.generation >= self.generations[-1], "generations only grow"
        self.generations.append(state.generation)
        if state.membership is not None:
            assert state.membership.leader in ranks
            assert list(state.membership.ranks) == sorted(ranks)
        if self.has_ended:
            return
        still = {rank for rank, worker in self.workers.items() if worker.stop is not None}
        assert still == set(state.stopped)
        assert not ranks or still != ranks, "all stand still, but nobody is told to go on"
        assert ranks or not state.asking, "nobody is left, but who has caught up is not let in"
        assert ranks == {r for r, w in self.workers.items() if w.in_membership and not w.is_gone}
        assert state.is_wished == (state.loop is not None and bool(state.asking or state.is_ending))


def moves(world: World) -> list[str]:
    """List what may happen next, as `verb rank`."""
    found = []
    for rank, worker in world.workers.items():
        if worker.is_gone:
            continue
        found.append(f"lose {rank}")
        if worker.waits:
            continue
        if not worker.in_membership:
            found.append(f"ask {rank}")
        else:
            found += [f"stop {rank}", f"pause {rank}", f"tell {rank}"]
            found += [f"finish {rank}"] if world.state.loop is None else []
    return [*found, "want stop"] if world.state.can_stop_between_steps else found


def move(world: World, what: str, now: float) -> None:
    verb, _, name = what.partition(" ")
    if what == "want stop":
        world.take(stop_wanted)
        return
    rank = int(name)
    worker = world.workers[rank]
    state = world.state
    match verb:
        case "lose":
            is_gone = not state.replaces
            world.workers[rank] = Worker(in_membership=False, is_gone=is_gone)
            world.take(lost_at(rank, now))
        case "ask":
            worker.waits = True
            kind = LOOP if worker.index % 2 else RESULT
            world.take(ask(rank, worker.index, kind))
        case "stop" | "pause":
            # Those who stand still all do so at the same place.
            others = list(state.stopped.values())
            between = others[0].between_steps if others else verb == "pause" and bool(state.loop)
            worker.stop = Stopped(7, between)
            worker.waits = True
            world.take(Said(rank, worker.stop))
        case "tell":
            index = len(state.history)
            if index % 2 == 0:
                world.take(result(index, RESULT, b"result"))
            elif state.loop is None:
                world.take(began(index, KEPT))
            else:
                world.take(result(index, LOOP, b"end"))
        case "finish":
            worker.is_gone = True
            world.take(gone(rank))


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.integers(0, 1000), max_size=60),
)
def test_whatever_happens_workers_go_on_together_or_stand_still(
    num_workers: int, replaces: bool, choices: list[int]
) -> None:
    state = READY(start(num_workers, restarts=1000, replaces=replaces)).state
    world = World(state, {rank: Worker() for rank in range(num_workers)})
    for now, choice in enumerate(choices):
        possible = moves(world)
        if world.has_ended or not possible:
            break
        move(world, possible[choice % len(possible)], float(now))
    # Whoever still waits is answered when those who still move stop or are lost.
    for rank in sorted(world.workers):
        if world.has_ended or world.state.membership is None:
            break
        worker = world.workers[rank]
        if rank in world.state.membership.ranks and worker.stop is None and world.state.stopped:
            move(world, f"stop {rank}" if rank % 2 else f"lose {rank}", 0.0)
    if not world.has_ended:
        assert all(worker.stop is None for worker in world.workers.values())
