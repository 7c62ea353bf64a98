"""The barrier with ranks as threads: the page is the same, only the processes are missing."""

import threading

import pytest

from unisono.comm.barrier import Barrier
from unisono.comm.control import ControlPage, Departure
from unisono.errors import MismatchError, PeerLostError, WaitTimeoutError


@pytest.fixture
def page_of():
    pages = []

    def make(world_size):
        pages.append(ControlPage.create(world_size))
        return pages[-1]

    yield make
    for page in pages:
        page.close()


def as_ranks(world_size, work):
    """Run `work(rank)` in a thread a rank; return what they returned or raised."""
    results = [None] * world_size

    def one(rank):
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_nobody_goes_on_before_everybody_has_come(page_of, world_size):
    page = page_of(world_size)
    come = [0] * world_size

    def work(rank):
        barrier = Barrier(page, rank)
        for round_ in range(1, 101):
            come[rank] = round_
            barrier.wait()
            assert min(come) >= round_
            barrier.wait()

    assert as_ranks(world_size, work) == [None] * world_size


def test_arrivals_are_counted_past_the_end_of_32_bits(page_of):
    page = page_of(2)
    for rank in range(2):
        page._words[rank * 16] = 2**32 - 3

    def work(rank):
        barrier = Barrier(page, rank)
        for _ in range(10):
            barrier.wait()

    assert as_ranks(2, work) == [None, None]
    assert page.arrivals(0) == 7


@pytest.mark.parametrize("how", [Departure.FINISHED, Departure.FAILED])
def test_who_waits_for_one_that_left_is_told(page_of, how):
    page = page_of(3)
    page.set_step(2, 41)

    def work(rank):
        if rank == 2:
            page.leave(2, how)
        else:
            Barrier(page, rank).wait()

    first, second, _ = as_ranks(3, work)
    for error in (first, second):
        assert isinstance(error, PeerLostError)
        assert error.rank == 2
        assert "last seen in step 41" in str(error)


def test_a_departure_wakes_a_sleeper(page_of):
    page = page_of(2)
    asleep = threading.Event()
    control_sleep = page.sleep_until_arrival

    def sleep(rank, seen, timeout_s):
        asleep.set()
        control_sleep(rank, seen, timeout_s)

    page.sleep_until_arrival = sleep

    def work(rank):
        if rank == 1:
            asleep.wait()
            page.leave(1, Departure.FAILED)
        else:
            Barrier(page, 0).wait()

    assert isinstance(as_ranks(2, work)[0], PeerLostError)


def test_one_that_came_and_then_left_held_nobody_up(page_of):
    page = page_of(2)
    page.set_purpose(1, 1, b"the end")
    page.arrive(1)
    page.leave(1, Departure.FINISHED)
    Barrier(page, 0).wait("the end")


def test_those_who_come_for_different_reasons_are_told_so(page_of):
    page = page_of(3)

    def work(rank):
        barrier = Barrier(page, rank)
        barrier.wait("digest")
        barrier.wait("save" if rank == 0 else "step 12")

    for rank, error in enumerate(as_ranks(3, work)):
        assert isinstance(error, MismatchError)
        assert f"rank {rank} came to `{'step 12' if rank else 'save'}`" in str(error)


def test_a_wait_ends_when_its_time_is_up_and_names_who_is_missing(page_of):
    page = page_of(3)
    page.set_step(0, 12)
    page.arrive(1)
    with pytest.raises(
        WaitTimeoutError, match=r"rank 0 in step 12 .* rank 2 \(last seen in step"
    ) as e:
        Barrier(page, 0, timeout_s=0.05).wait()
    assert e.value.missing == (2,)


def test_a_long_wait_is_told_once_by_one_rank(page_of):
    page = page_of(3)
    said = []

    def work(rank):
        if rank != 2:
            Barrier(page, rank, timeout_s=0.5, notice_after_s=0.05, say=said.append).wait()

    as_ranks(3, work)
    assert len(said) == 1
    assert "rank 0" in said[0]
    assert "rank 2" in said[0]


def test_messages_pass_through_the_page(page_of):
    page = page_of(2)
    page.post(1, b"hello")
    assert page.posted(1) == b"hello"
    assert page.posted(0) == b""
