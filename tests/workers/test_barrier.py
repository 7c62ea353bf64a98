"""The barrier with ranks as threads: the control is the same, only the processes are missing."""

import itertools

import pytest
from tests.promises import promise
from tests.threads import in_threads

from unisono.errors import PeerLostError, WaitTimeoutError
from unisono.runtime.workers import meeting_point
from unisono.runtime.workers import meeting_point as futex
from unisono.runtime.workers.control_block import Barrier
from unisono.runtime.workers.meeting_point import Departure


def meet(barrier, purpose=""):
    barrier.arrive(purpose)
    return barrier.wait()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_nobody_goes_on_before_everybody_has_come(control_of, world_size):
    control = control_of(world_size)
    come = [0] * world_size

    def work(rank):
        barrier = Barrier(control, rank)
        for round_ in range(1, 101):
            come[rank] = round_
            assert meet(barrier)
            assert min(come) >= round_
            assert meet(barrier)

    assert in_threads(world_size, work) == [None] * world_size


def test_a_processor_that_reads_out_of_order_is_told_not_to(control_of, monkeypatch):
    monkeypatch.setattr(futex, "_READS_STAY_IN_ORDER", False)
    told = []
    monkeypatch.setattr(
        futex, "add_and_wake", lambda *args, do=futex.add_and_wake: told.append(args) or do(*args)
    )
    control = control_of(1)
    assert meet(Barrier(control, 0))
    assert [args[1:] for args in told] == [(0,)]  # orders reads
    assert control.lines[0].arrivals == 1


def test_arrivals_are_counted_past_the_end_of_32_bits(control_of):
    control = control_of(2)
    for rank in range(2):
        control.mark_replaced(rank, 2**32 - 3)

    def work(rank):
        barrier = Barrier(control, rank)
        return [meet(barrier) for _ in range(10)]

    assert in_threads(2, work) == [[True] * 10] * 2
    assert control.lines[0].arrivals == Barrier(control, 0).arrivals == 7


@pytest.mark.parametrize("how", [Departure.FINISHED, Departure.FAILED])
def test_who_waits_for_one_that_left_is_told(control_of, how):
    control = control_of(3)
    control.lines[2].begun = 42

    def work(rank):
        if rank == 2:
            control.leave(2, how)
        else:
            meet(Barrier(control, rank))

    first, second, _ = in_threads(3, work)
    for error in (first, second):
        assert isinstance(error, PeerLostError)
        assert error.rank == 2
        assert "last seen in step 41" in str(error)
    assert control.has_lost


@pytest.mark.parametrize("how", [Departure.FINISHED, Departure.FAILED, Departure.LOST])
def test_one_that_came_and_then_left_held_nobody_up(control_of, how):
    control = control_of(2)
    control.lines[1].purposes[1].value = b"the end"
    control.lines[1].arrive()
    control.leave(1, how)
    assert meet(Barrier(control, 0), "the end")


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        (Departure.LOST, Departure.PRESENT, None),
        (Departure.PRESENT, Departure.LOST, None),
        (Departure.FAILED, Departure.PRESENT, PeerLostError),
        (Departure.FAILED, Departure.LOST, PeerLostError),
        (Departure.LOST, Departure.FAILED, None),  # the first in rank order is told
    ],
)
def test_one_of_several_missing_is_enough_to_stop(control_of, first, second, error):
    control = control_of(3)
    control.leave(1, first)
    control.leave(2, second)

    def work(rank):
        return meet(Barrier(control, 0))

    (seen,) = in_threads(1, work)
    assert seen is False if error is None else isinstance(seen, error)


@pytest.mark.parametrize("stale", [0, 40, 1000])
def test_one_that_takes_the_place_of_another_counts_where_the_others_are(control_of, stale):
    control = control_of(2)
    control.mark_replaced(0, 41)
    control.mark_replaced(1, stale)
    control.leave(1, Departure.LOST)
    control.mark_replaced(1, 41)

    def work(rank):
        barrier = Barrier(control, rank)
        return meet(barrier, "step 42"), barrier.arrivals

    assert control.departure(1) == Departure.PRESENT
    assert in_threads(2, work) == [(True, 42)] * 2


@promise("where-it-ends.8")
def test_a_wait_ends_when_its_time_is_up_and_names_who_is_missing(control_of, monkeypatch):
    monkeypatch.setenv("UNISONO_MEETING_TIMEOUT", "0.05")
    control = control_of(3)
    control.lines[0].begun = 13
    control.lines[1].arrive()
    with pytest.raises(
        WaitTimeoutError, match=r"rank 0 in step 12 .* rank 2 \(last seen in step"
    ) as e:
        meet(Barrier(control, 0))
    assert e.value.missing == (2,)


def test_a_long_wait_is_told_once_by_one_rank(control_of, monkeypatch):
    control = control_of(3)
    said, looks = [], itertools.count()
    monkeypatch.setattr(meeting_point, "SLEEP_AT_MOST_S", 1e-3)
    monkeypatch.setattr(meeting_point, "say", said.append)

    def look():
        if said and next(looks) == 20:
            Barrier(control, 2).arrive()

    def work(rank):
        meet(Barrier(control, rank, notice_after_s=0.01, look_around=look))

    in_threads(2, work)
    assert len(said) == 1
    assert "rank 0" in said[0]
    assert "rank 2" in said[0]
