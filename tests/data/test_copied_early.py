"""Batches come to a device beside what it computes, the next one before it is asked for.

Nothing of that can be seen but in time: the same bits, the same errors at the same places.
"""

import os
import select
import signal
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from tests.accelerator import sim
from torch.utils.data import Dataset, TensorDataset

from unisono.data import second_reading
from unisono.data.fetch import fetcher
from unisono.data.loader import Loader, ShardPosition
from unisono.errors import LoadingError
from unisono.plan.samples import SamplePlan
from unisono.runtime.device import Device

pytestmark = pytest.mark.usefixtures("accelerator")

SHARDS = (0, 1)
PLAN = SamplePlan(num_samples=24, batch_size=8, shards=4, seed=3)
PLACES = [ShardPosition(0, batch, shard) for batch in range(3) for shard in SHARDS]
NUMBERS = TensorDataset(torch.randn(24, 5), torch.arange(24))


class Unreadable(Dataset):
    """One sample of the third batch of these shards cannot be read."""

    def __init__(self, *, dies=False):
        order = PLAN.order(0)
        self.bad = int(PLAN.shard_indices(order, 1, 0)[0])
        self.dies = dies

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.bad:
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a broken file")
        return torch.full((3,), float(index))


def device(name="sim:1"):
    return Device.of(name, SimpleNamespace(local_rank=0, local_world_size=1))


def loader_of(dataset=NUMBERS, num_processes=1, where="sim:1", **options):
    return Loader(
        fetcher(dataset, **options),
        PLAN,
        num_processes=num_processes,
        num_batches=3,
        device=device(where),
    )


def wait_until_ready(loader):
    ahead = loader._ahead
    poll = select.poll()
    poll.register(ahead._next_loader().results_fd, select.POLLIN)
    assert poll.poll(30_000)


def batches(loader, *, early):
    """Give the batches of all places, each used and dropped before the next one is asked for."""
    for place in PLACES:
        numbers, labels = loader.batch(place, SHARDS)
        yield (numbers * 2 + labels[:, None]).sum(1)
        if early and loader.copies_early and loader._ahead.under_way:
            wait_until_ready(loader)
            loader.take_early()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("num_processes", [0, 2])
def test_the_host_never_waits_and_bits_are_the_same(num_processes, early):
    with loader_of(num_processes=num_processes) as loader, sim.synchronizations() as seen:
        found = list(batches(loader, early=early))
    assert seen == []
    with loader_of(num_processes=0, where="cpu") as loader:
        expected = list(batches(loader, early=False))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def test_the_next_batch_is_on_its_way_before_it_is_asked_for():
    with loader_of() as loader:
        loader.batch(PLACES[0], SHARDS)
        torch.sim.synchronize(1)
        wait_until_ready(loader)
        assert sim.pending_copies(1) == 0
        loader.take_early()
        assert sim.pending_copies(1) == 2
        taken = loader._ahead.under_way[0]
        loader.take_early()
        assert loader._ahead.under_way[0] == taken == PLACES[2]  # one, not more
        with sim.synchronizations() as seen:
            numbers, labels = loader.batch(PLACES[1], SHARDS)
            numbers + labels[:, None]
        assert seen == []


def test_copies_do_not_wait_for_what_the_device_computes():
    busy = torch.ones(3, device="sim:1")
    with loader_of(num_processes=0) as loader:
        loader.batch(PLACES[0], SHARDS)
        torch.sim.synchronize(1)
        side = loader._device._arrivals._stream
        busy * 2  # on the stream that computes
        loader.batch(PLACES[1], SHARDS)
        assert sim.pending_copies(1) == 2
        # Whoever waited for the copies alone has not waited for the product.
        side.synchronize()
        assert sim.pending_copies(1) == 0
        with pytest.raises(RuntimeError, match="nothing orders the two"), torch.Stream("sim:1"):
            busy.zero_()


def test_nothing_is_taken_that_is_not_there(monkeypatch):
    monkeypatch.setattr(second_reading, "_PART_OF_TIME", 1e-9)  # samples are compared once
    reading, writing = os.pipe()

    class Slow(Unreadable):
        def __getitem__(self, index):
            os.read(reading, 1)
            return torch.zeros(1)

    os.write(writing, bytes(4))  # the first sample is read twice more
    with loader_of(Slow()) as loader:
        loader.batch(PLACES[0], SHARDS)
        loader.take_early()
        assert loader._ahead.under_way[0] == PLACES[1]
        os.write(writing, bytes(24))
        loader.batch(PLACES[1], SHARDS)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("dies", [False, True])
def test_an_error_comes_when_its_batch_is_asked_for(dies):
    with loader_of(Unreadable(dies=dies)) as loader:
        for place in PLACES[:2]:
            loader.batch(place, SHARDS)
            if loader._ahead is not None:
                wait_until_ready(loader)
            loader.take_early()
        assert loader._ahead is None  # its processes have ended
        words = "killed by SIGKILL" if dies else "a broken file"
        with pytest.raises(LoadingError, match=words):
            loader.batch(PLACES[2], SHARDS)


@pytest.mark.slow
def test_an_error_of_a_batch_that_nobody_asks_for_is_of_no_account():
    with loader_of(Unreadable()) as loader:
        for place in PLACES[:2]:
            loader.batch(place, SHARDS)
            wait_until_ready(loader)
            loader.take_early()
        again = loader.batch(PLACES[0], SHARDS)  # a worker was lost, and the run goes back
        assert again.tolist() == loader._read(PLACES[0]).tolist()


def taken_early(loader):
    loader.batch(PLACES[0], SHARDS)
    wait_until_ready(loader)
    loader.take_early()


def test_a_run_that_goes_back_reads_again():
    with loader_of() as loader:
        taken_early(loader)
        again = [loader.batch(place, SHARDS)[1].tolist() for place in PLACES]
        assert again == [loader._read(place)[1].tolist() for place in PLACES]


def test_shards_of_a_lost_worker_are_read_in_between():
    with loader_of() as loader:
        taken_early(loader)
        others = loader.batch(ShardPosition(0, 0, 3), SHARDS)[1].tolist()
        assert others == loader._read(ShardPosition(0, 0, 3))[1].tolist()
        processes = loader._ahead
        assert loader.batch(PLACES[1], SHARDS)[1].tolist() == loader._read(PLACES[1])[1].tolist()
        assert processes is loader._ahead  # it was not read twice


def test_other_shards_are_read_by_other_processes():
    with loader_of() as loader:
        taken_early(loader)
        found = [loader.batch(ShardPosition(0, 1, shard), (2, 3))[1].tolist() for shard in (2, 3)]
        assert found == [loader._read(ShardPosition(0, 1, shard))[1].tolist() for shard in (2, 3)]


def test_a_batch_for_which_there_is_no_room_yet_is_copied_later():
    with loader_of() as loader:
        loader.batch(PLACES[0], SHARDS)
        wait_until_ready(loader)
        sim.limit(1, torch.sim.memory_allocated(1) + 10)
        loader.take_early()
        with pytest.raises(torch.OutOfMemoryError):
            loader.batch(PLACES[1], SHARDS)
        sim.limit(1, None)
    with loader_of() as loader:
        loader.batch(PLACES[0], SHARDS)
        wait_until_ready(loader)
        sim.limit(1, torch.sim.memory_allocated(1) + 10)
        loader.take_early()
        sim.limit(1, None)
        assert loader.batch(PLACES[1], SHARDS)[1].tolist() == loader._read(PLACES[1])[1].tolist()


class Pair(NamedTuple):
    image: torch.Tensor
    label: object


@dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    name: str


class Own:
    """Moves itself."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Own(self.tensor.to(device))


FORMS = {
    "tensor": lambda ones: ones,
    "nested": lambda ones: {"a": [ones, (ones + 1, "word", 3)], "b": None},
    "ordered": lambda ones: OrderedDict(a=ones),
    "named tuple": lambda ones: Pair(ones, Pair(ones * 2, None)),
    "dataclass": lambda ones: Graph(ones, "g"),
    "empty": lambda ones: ones[:0],
    "transposed": lambda ones: torch.randn(3, 4).t(),
    "its own way": Own,
    "a number": lambda ones: torch.tensor(7),
    "with a gradient": lambda ones: ones.requires_grad_(),
    "strings alone": lambda ones: ["a", {"b": "c"}],
    "twice the same": lambda ones: [ones, ones],
}


def tensors_of(batch):
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = batch.values()
    elif isinstance(batch, Own | Graph):
        batch = vars(batch).values()
    elif not isinstance(batch, list | tuple):
        return []
    return [tensor for part in batch for tensor in tensors_of(part)]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_whatever_a_batch_is_made_of_arrives(form):
    batch = form(torch.ones(4))
    there = device().move(batch)
    assert type(there) is type(batch)
    pairs = list(zip(tensors_of(there), tensors_of(batch), strict=True))
    assert all(one.device == torch.device("sim:1") for one, _ in pairs)
    assert all(one.stride() == other.stride() for one, other in pairs)
    for one, other in pairs:
        (one * 2).sum()
        assert torch.equal(one.detach().cpu(), other.detach())


def refuse(*_):
    raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")


def test_batches_arrive_where_memory_cannot_be_pinned(monkeypatch, capfd):
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    with loader_of(num_processes=0) as loader:
        found = [loader.batch(place, SHARDS)[1].tolist() for place in PLACES]
    assert found == [loader._read(place)[1].tolist() for place in PLACES]
    told = capfd.readouterr().err
    assert told.count("not pinned") == 1
    assert "(CUDA error: out of memory): results are the same" in told


def test_memory_that_cannot_be_pinned_in_place_is_told_once(monkeypatch, capfd):
    monkeypatch.setattr(torch.sim._Runtime, "cudaHostRegister", staticmethod(lambda *_: 801))
    here = device()
    assert [here.register(torch.zeros(8)) for _ in range(3)] == [None] * 3
    assert capfd.readouterr().err.count("gradients and buffers are copied through memory") == 1
