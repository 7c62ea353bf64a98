"""Sends, receives, and the memory they use."""

import mmap
import threading
import time
from datetime import timedelta

import pytest
import torch

from unisono.errors import MismatchError, PeerLostError, WaitTimeoutError
from unisono.runtime.c10d.group_memory import RING_ENTRIES, Blocks


def test_both_may_send_anything_before_either_receives(as_ranks):
    def work(group, rank):
        other = 1 - rank
        for size in (10, 3_000_000):
            group.send([torch.full((size,), float(rank))], other, 0)
        for size in (10, 3_000_000):
            tensor = torch.empty(size)
            group.recv([tensor], other, 0).wait()
            assert tensor.eq(other).all()

    assert as_ranks(2, work) == [None, None]


def test_a_message_outlives_its_sender(as_ranks):
    has_left = threading.Event()

    def work(group, rank):
        if rank == 0:
            group.send([torch.arange(5.0)], 1, 7)
            group.shutdown()
            has_left.set()
            return None
        assert has_left.wait(20)
        tensor = torch.empty(5)
        group.recv([tensor], 0, 7).wait()
        with pytest.raises(PeerLostError, match="rank 10 must send 5 float32"):
            group.recv([tensor], 0, 7).wait()
        return tensor.tolist()

    assert as_ranks(2, work)[1] == [0, 1, 2, 3, 4]


def test_a_receive_that_gets_something_else_says_what(as_ranks):
    def work(group, rank):
        if rank == 0:
            group.send([torch.ones(5)], 1, 2)
            return group.barrier().wait()
        receiving = group.recv([torch.ones(6, dtype=torch.int64)], 0, 2)
        with pytest.raises(MismatchError, match=r"rank 10 has sent 5 float32 .* 6 int64 elements"):
            receiving.wait()
        return group.barrier().wait()

    assert as_ranks(2, work) == [True, True]


def test_a_receive_can_be_asked_and_has_a_time_limit(as_ranks):
    def work(group, rank):
        if rank == 0:
            receiving = group.recv([torch.empty(1)], 1, 0)
            assert not receiving.is_completed()
            with pytest.raises(WaitTimeoutError, match="rank 11 must send 1 float32 elements"):
                receiving.wait(timedelta(seconds=0.05))
            group.barrier()
            assert receiving.wait()
            assert receiving.is_completed()
            return receiving.get_future().wait()[0].item()
        group.barrier()
        group.send([torch.tensor([4.0])], 0, 0)
        return None

    assert as_ranks(2, work) == [4.0, None]


def test_a_receive_that_has_timed_out_takes_no_later_message(as_ranks):
    def work(group, rank):
        if rank == 1:
            time.sleep(0.5)
            group.barrier().wait()
            for number in (1.0, 2.0, 3.0):
                group.send([torch.tensor([number])], 0, 0)
            return group.barrier().wait()
        given_up, tensors = torch.zeros(1), [torch.zeros(1), torch.zeros(1)]
        receiving = group.recv([given_up], 1, 0)
        with pytest.raises(WaitTimeoutError):
            receiving.wait()
        group.barrier().wait()
        for tensor in tensors:
            group.recv([tensor], 1, 0).wait()
        receiving.wait()  # asks once more
        group.barrier().wait()
        return [tensor.item() for tensor in (*tensors, given_up)]

    assert as_ranks(2, work, timeout_s=0.4) == [[1.0, 2.0, 3.0], True]


@pytest.mark.slow
def test_both_may_send_more_than_a_ring_holds_before_either_receives(as_ranks):
    count = 2 * RING_ENTRIES + 3

    def work(group, rank):
        other = 1 - rank
        for number in range(count):
            group.send([torch.tensor([number])], other, 0)
        tensor = torch.empty(1, dtype=torch.int64)
        for number in range(count):
            group.recv([tensor], other, 0).wait()
            assert tensor.item() == number

    assert as_ranks(2, work, timeout_s=10.0) == [None, None]


@pytest.mark.slow
def test_a_full_ring_that_nobody_reads_ends_in_words(as_ranks):
    def work(group, rank):
        if rank == 0:
            with pytest.raises((PeerLostError, WaitTimeoutError), match="fetch one of 1,024"):
                for _ in range(RING_ENTRIES + 1):
                    group.send([torch.ones(1)], 1, 0)

    assert as_ranks(2, work, timeout_s=1.0) == [None, None]


def test_the_memory_of_read_messages_is_used_again(as_ranks):
    def work(group, rank):
        tensor, places = torch.ones(100_000), set()
        for _ in range(20):
            if rank == 0:
                group.send([tensor], 1, 0)
                places.add(group.member.messages._unread[-1])
            else:
                group.recv([tensor], 0, 0).wait()
            group.barrier()
        return len(places)

    assert as_ranks(2, work)[0] <= 2


def test_blocks_are_aligned_and_apart_and_used_again():
    blocks = Blocks(mmap.mmap(-1, 8192), range(4096, 4608))
    taken = [blocks.take(n) for n in (1, 64, 65, 200)]
    assert taken == [4096, 4160, 4224, 4352]
    with pytest.raises(MemoryError, match="no room for 64 bytes more: receive what was sent"):
        blocks.take(1)
    for start in taken:
        blocks.give_back(start)
    assert [blocks.take(n) for n in (129, 65, 64, 64)] == [4352, 4224, 4160, 4096]


def test_the_pages_of_a_large_block_go_back_to_the_kernel():
    mapping = mmap.mmap(-1, 128 << 20)
    blocks = Blocks(mapping, range(128 << 20))
    offset = blocks.take(100 << 20)
    mapping[offset : offset + 4] = b"full"
    blocks.give_back(offset)
    assert mapping[offset : offset + 4] == bytes(4)
