"""Who of a process group has come: tables of events and what follows, without a process."""

from __future__ import annotations

import math

import pytest

from unisono.launch.gathering import (
    Arrival,
    Complete,
    GatheringState,
    Outcomes,
    Refuse,
    come,
    leave,
    look,
)
from unisono.workers.launcher_messages import GroupRequest, Why


def at(
    worker: int,
    rank: int | None = None,
    place: str = "port 1",
    size: int = 3,
    now: float = 0.0,
    timeout_s: float = 100.0,
) -> Arrival:
    rank = worker if rank is None else rank
    return Arrival(worker, GroupRequest(place, rank, size, timeout_s, needs_store=True), now)


def after(*events: Arrival | int, workers: int = 3) -> tuple[GatheringState, Outcomes]:
    """Let workers come (an arrival) and leave (a number); return what the last one led to."""
    state, outcomes = GatheringState(frozenset(range(workers))), ()
    for event in events:
        state, outcomes = leave(state, event) if isinstance(event, int) else come(state, event)
    return state, outcomes


def ranks_complete(outcomes: Outcomes) -> list[list[int]]:
    return [[a.worker for a in one.gathering.came] for one in outcomes if isinstance(one, Complete)]


def refusal(outcomes: Outcomes) -> Refuse:
    (one,) = outcomes
    assert isinstance(one, Refuse)
    return one


def test_nobody_goes_on_before_all_have_come() -> None:
    state, outcomes = after(at(2), at(0))
    assert (outcomes, state.waiting) == ((), {0, 2})
    state, outcomes = after(at(2), at(0), at(1))
    assert (ranks_complete(outcomes), state.waiting, state.open) == ([[2, 0, 1]], frozenset(), ())


def test_a_group_of_one_waits_for_nobody() -> None:
    for worker in range(3):
        assert ranks_complete(after(at(worker, rank=0, size=1))[1]) == [[worker]]


def test_groups_at_one_place_come_one_after_the_other() -> None:
    rounds = [at(worker) for _ in range(3) for worker in range(3)]
    for count in (3, 6, 9):
        assert ranks_complete(after(*rounds[:count])[1]) == [[0, 1, 2]]


def test_two_groups_may_meet_at_two_places_at_once() -> None:
    here = [at(0, 0, "port 1", 2), at(2, 0, "port 2", 2), at(1, 1, "port 1", 2)]
    state, outcomes = after(*here, workers=4)
    assert (ranks_complete(outcomes), state.waiting) == ([[0, 1]], {2})
    assert ranks_complete(after(*here, at(3, 1, "port 2", 2), workers=4)[1]) == [[2, 3]]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (at(0), at(1, rank=0), "workers 0 and 1 both say that they are rank 0"),
        (at(0), at(1, size=2), "worker 0 says 3 and worker 1 says 2"),
    ],
)
def test_those_who_contradict_each_other_are_all_told(
    first: Arrival, second: Arrival, words: str
) -> None:
    state, outcomes = after(first, second)
    told = refusal(outcomes)
    assert (told.workers, told.answer.why, state.open) == ({0, 1}, Why.MISMATCH, ())
    assert words in told.answer.reason


def test_those_who_wait_for_each_other_at_two_places_are_told_both() -> None:
    events = (at(0, size=4), at(1, size=4), at(3, 1, "port 2", 2))
    assert after(*events, workers=4)[1] == ()  # worker 2 may complete the second
    state, outcomes = after(*events, at(2, place="port 3", size=4), workers=4)
    told = refusal(outcomes)
    assert (told.workers, told.answer.why, state.open) == ({0, 1, 2, 3}, Why.MISMATCH, ())
    assert (
        "workers 0, 1 at port 1 for 4 ranks; worker 3 at port 2 for 2 ranks;" in told.answer.reason
    )


@pytest.mark.parametrize(
    ("events", "workers"),
    [
        ((at(0), at(1), 2), {0, 1}),  # who was missing has ended
        ((2, at(0)), {0}),  # had ended before
        ((at(0), at(2), 2), {0}),  # who had come has ended
    ],
)
def test_nobody_waits_for_one_that_has_ended(
    events: tuple[Arrival | int, ...], workers: set[int]
) -> None:
    state, outcomes = after(*events)
    told = refusal(outcomes)
    assert (told.workers, told.answer.why, told.answer.lost, state.open) == (
        workers,
        Why.LOST,
        2,
        (),
    )
    assert "worker 2 has ended" in told.answer.reason


def test_one_that_is_not_needed_may_end() -> None:
    assert after(at(0, size=2), 2)[1] == ()
    assert after(2, at(0, size=2))[1] == ()


def test_an_end_is_noted_once() -> None:
    assert after(2, 2)[0] == GatheringState(frozenset({0, 1}), ended=(2,))


def test_where_each_waits_is_known_as_long_as_it_does() -> None:
    state, _ = after(at(0, now=5.0), at(2, now=6.0, place="port 2", size=2), workers=4)
    assert state.places == {0: "port 1", 2: "port 2"}
    assert state.waiting == {0, 2}
    assert state.due_s == 105.0
    assert look(state, 104.9) == (state, ())
    assert after(at(0), at(1), at(2))[0].places == {}


def test_a_timeout_ends_the_wait_for_all() -> None:
    state, _ = after(at(0, now=5.0), at(2, now=6.0, timeout_s=2.0))
    assert state.due_s == 8.0
    state, outcomes = look(state, 8.0)
    told = refusal(outcomes)
    assert (told.workers, told.answer.why, told.answer.missing, told.answer.waited_s) == (
        {0, 2},
        Why.LATE,
        (1,),
        2.0,
    )
    assert (
        "within its timeout of 2 s, but rank 1 has not: look what worker 1 does"
        in told.answer.reason
    )
    assert (state.open, state.due_s) == ((), math.inf)
