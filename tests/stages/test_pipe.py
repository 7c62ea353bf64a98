"""What crosses between stages arrives as it was; every wait ends."""

import os
from types import SimpleNamespace

import pytest
import torch

from unisono.errors import PeerLostError
from unisono.stages.pipe import MessageKind, ReplicaBrokenError, StagePipe
from unisono.workers.meeting_point import Departure
from unisono.workers.memory import Memory
from unisono.workers.proc import create_memory
from unisono.workers.waiting import awaited_rank, stage_wait_in_words


class FakeTeam:
    """Two stages in one process. Final."""

    num_stages, world_size = 2, 2

    def __init__(self, memory, stage, departures=None, further=()):
        self._memory, self.stage, self.replica = memory, stage, (0, 1)
        self.world = SimpleNamespace(rank=stage, world_size=2)
        self.membership = SimpleNamespace(generation=1)
        self._departures, self._further = departures or {}, further

    def memory(self, key, num_bytes):
        del key
        if not self._memory:
            fd = create_memory("unisono-test", num_bytes)
            self._memory.append(Memory.map(fd, num_bytes))
            os.close(fd)
        return self._memory[0]

    def meet(self, purpose):
        return purpose == "stages"

    def departure(self, rank):
        return self._departures.get(rank, Departure.PRESENT)

    def has_gone_further(self, rank):
        return rank in self._further


def ends(**of_second):
    memory = []
    return StagePipe(FakeTeam(memory, 0), 1, 2), StagePipe(FakeTeam(memory, 1, **of_second), 1, 2)


def transposed():
    return torch.arange(24.0).view(4, 6).t()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        transposed(),
        torch.randn(4, 9)[:, 1::2],
        torch.randn(5, 1).expand(5, 7),
        torch.randn(100)[3:40],
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(7, dtype=torch.bfloat16),
        torch.arange(5) > 2,
        torch.view_as_complex(torch.randn(3, 2)).conj(),
        torch.randn(3, 4, requires_grad=True),
    ],
)
def test_a_tensor_arrives_with_its_strides_and_alignment(tensor):
    first, second = ends()
    first.send(1, 0, MessageKind.VALUE, tensor)
    found = second.receive(0, 0, MessageKind.VALUE, 0).tensor
    assert torch.equal(found.detach(), tensor.detach())
    assert found.requires_grad == tensor.requires_grad
    if not tensor.is_conj():
        assert found.stride() == tensor.stride()
        assert found.data_ptr() % 64 == tensor.data_ptr() % 64 or not tensor.numel()


def test_messages_come_in_order_and_slots_are_used_again():
    first, second = ends()
    for shard in range(5):
        for size in (3, 2000):
            first.send(1, shard, MessageKind.VALUE, torch.full((size,), float(shard)))
        for size in (3, 2000):
            found = second.receive(0, shard, MessageKind.VALUE, shard).tensor
            assert found.tolist() == [shard] * size
        second.send(0, shard, MessageKind.NO_BACKWARD)
        assert first.receive(1, shard, MessageKind.BACKWARD, shard).kind == MessageKind.NO_BACKWARD


def test_what_was_sent_before_a_change_of_the_membership_is_passed_over():
    first, second = ends()
    first.send(1, 0, MessageKind.VALUE, torch.ones(1))
    assert all([first.restart(), second.restart()])
    first.send(1, 0, MessageKind.VALUE, torch.zeros(1))
    assert second.receive(0, 0, MessageKind.VALUE, 0).tensor.item() == 0


def test_what_a_lost_worker_had_sent_counts():
    first, second = ends(departures={0: Departure.LOST})
    first.send(1, 0, MessageKind.VALUE, torch.ones(1))
    assert second.receive(0, 0, MessageKind.VALUE, 0).tensor.item() == 1


def test_nobody_waits_for_a_lost_worker():
    _, second = ends(departures={0: Departure.LOST})
    with pytest.raises(ReplicaBrokenError):
        second.receive(0, 0, MessageKind.VALUE, 0)


def test_nobody_waits_for_one_that_has_ended():
    _, second = ends(departures={0: Departure.FINISHED})
    with pytest.raises(PeerLostError, match="must get the activations of stage 0 for shard 7"):
        second.receive(0, 0, MessageKind.VALUE, 7)


def test_sparse_tensors_do_not_cross():
    first, _ = ends()
    with pytest.raises(TypeError, match="must be a dense tensor"):
        first.send(1, 0, MessageKind.VALUE, torch.ones(3).to_sparse())


def test_what_has_as_many_dimensions_as_a_header_holds_crosses():
    first, second = ends()
    most = torch.arange(4.0).reshape(*[1] * 11, 2, 2)
    first.send(1, 0, MessageKind.VALUE, most)
    assert second.receive(0, 0, MessageKind.VALUE, 0).tensor.equal(most)
    with pytest.raises(TypeError, match="must have at most 13 dimensions, but has 14"):
        first.send(1, 0, MessageKind.VALUE, most[None])


@pytest.mark.parametrize(
    ("wait", "rank"),
    [
        (stage_wait_in_words("activations", 0, 3, 2).encode(), 2),
        (stage_wait_in_words("gradients", 1, 12, 7).encode(), 7),
        (b"barrier (call 3)", None),
        (None, None),
    ],
)
def test_the_launcher_reads_for_whom_a_stage_waits(wait, rank):
    assert awaited_rank(wait) == rank
