"""What runs take of their devices is told; of a full one what was needed, and what to do."""

import errno
import json

import pytest
import torch
from tests.accelerator import sim
from tests.classified import cross_entropy as plain
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback
from unisono.errors import OutOfMemoryError
from unisono.runtime.device import Device, host
from unisono.runtime.workers.memory import Memory
from unisono.runtime.world import World
from unisono.tools.report.top import LiveView

ROOM = 1_000_000
DATA = TensorDataset(torch.randn(32, 6), torch.zeros(32, dtype=torch.int64))


class Fills(Callback):
    def __init__(self, at=2):
        self.at = at

    def on_step_begin(self, fit):
        if fit.step == self.at:
            sim.limit(0, torch.sim.memory_allocated(0) + 8)


class Greedy(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == 3:
            torch.empty(ROOM, device="sim")
        super().step(closure)


class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        torch.empty(ROOM, device="sim")
        return gradient


def wide(model, batch):
    return plain(model, batch) + torch.ones(ROOM, device="sim").mean()


def deep(model, batch):
    return F.cross_entropy(Hungry.apply(model(batch[0])), batch[1])


def make(loss=plain, optimizer=torch.optim.SGD, device="sim", **options):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh())
    optimizer = optimizer(model.parameters(), lr=0.1, momentum=0.9)
    return unisono.Trainer(model, optimizer, loss, shards=2, device=device, **options)


def caught(call):
    with pytest.raises(OutOfMemoryError) as info:
        call()
    assert isinstance(info.value.__cause__, torch.OutOfMemoryError)
    assert isinstance(info.value, MemoryError)
    return info.value


PHASES = {
    "copy of a batch": ({"callbacks": [Fills()]}, 2, 0),
    "forward pass": ({"loss": wide}, 0, 0),
    "backward pass": ({"loss": deep}, 0, 0),
    "update": ({"optimizer": Greedy}, 2, None),
}


@pytest.mark.parametrize("phase", PHASES)
def test_it_is_told_where_memory_was_full(accelerator, phase):
    options, step, shard = PHASES[phase]
    accelerator.limit(0, ROOM)
    trainer = make(**options)
    error = caught(lambda: trainer.fit(DATA, batch_size=8, steps=6))
    assert (error.rank, error.device) == (0, "sim:0")
    assert (error.phase, error.step, error.shard) == (phase, step, shard)
    of_shard = "" if shard is None else f" of shard {shard}"
    assert f"the {phase}{of_shard} in step {step} needs, but rank 0 found it full" in str(error)
    assert ("`shards=4` (now 2)" in str(error)) == (phase != "update")


def test_it_is_told_what_the_step_needed(accelerator):
    accelerator.limit(0, ROOM)
    trainer = make(optimizer=Greedy)
    error = caught(lambda: trainer.fit(DATA, batch_size=8, steps=6))
    parameters = 4 * (6 * 8 + 8 + 2 * 8)
    of_buffers = 2 * 8 * 4 + 8
    assert error.needed["parameters"] == parameters + of_buffers
    assert error.needed["gradients"] == parameters
    assert error.needed["optimizer state"] == parameters  # momentum
    assert sum(error.needed.values()) == torch.sim.max_memory_allocated(0)
    assert 0 < error.needed["activations"] < ROOM
    assert "found it full: parameters 360 B, gradients 288 B, optimizer state 288 B, " in str(error)
    assert "less state, or pass it `foreach=False`" in str(error)


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_passes_without_training_say_so(accelerator, name):
    accelerator.limit(0, ROOM)

    def forward(model, batch):
        torch.empty(ROOM, device="sim")
        return model(batch[0])

    trainer = make(loss=forward)
    options = {"forward": forward} if name == "predict" else {}
    error = caught(lambda: getattr(trainer, name)(DATA, batch_size=8, **options))
    assert (error.phase, error.step, error.shard) == (f"pass of `{name}`", None, None)
    assert "pass a smaller `batch_size` there" in str(error)


@pytest.mark.slow
def test_a_loop_that_does_not_fit_says_so(accelerator):
    trainer = make()
    accelerator.limit(0, torch.sim.memory_allocated(0) + 64)
    error = caught(lambda: trainer.fit(DATA, batch_size=8, steps=6))
    assert error.phase == "start of the loop"
    assert "`shards=" not in str(error)


def test_other_errors_are_left_alone(accelerator):
    def wrong(model, batch):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match=r"^something else\nThis was in step 0, in the") as info:
        make(loss=wrong).fit(DATA, batch_size=8, steps=2)
    assert info.value.__cause__ is None


def events(directory, kind):
    lines = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def test_the_event_file_has_the_explanation(accelerator, tmp_path):
    accelerator.limit(0, ROOM)
    caught(lambda: make(loss=wide, directory=tmp_path).fit(DATA, batch_size=8, steps=2))
    (last,) = events(tmp_path, "failure")
    assert last["error"] == "OutOfMemoryError"
    assert "To make room: pass `shards=4`" in last["message"]


def test_the_memory_of_the_host_is_told_alike():
    def endless(model, batch):
        return plain(model, batch) + torch.empty(2**50).mean()

    with pytest.raises(OutOfMemoryError, match="the memory of this machine must hold") as info:
        make(loss=endless, device="cpu").fit(DATA, batch_size=8, steps=2)
    assert "DefaultCPUAllocator" in str(info.value.__cause__)
    assert (info.value.phase, info.value.shard) == ("forward pass", 0)
    assert "activations" not in info.value.needed


def test_memory_that_the_system_refuses_is_told_alike(monkeypatch):
    def refuse(fd, num_bytes):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Memory, "map", refuse)
    with pytest.raises(OutOfMemoryError, match="the memory of this machine must hold") as info:
        make(device="cpu").fit(DATA, batch_size=8, steps=2)
    assert info.value.phase == "start of the loop"


def full_on_one(directory):
    sim.install()
    sim.limit(1, ROOM)

    def loss(model, batch):
        there = batch[0].device
        return plain(model, batch) + torch.ones(ROOM, device=there).mean()

    make(loss=loss, directory=directory).fit(DATA, batch_size=8, steps=2)


@pytest.mark.slow
def test_the_worker_that_has_no_room_is_named(tmp_path):
    if reason := sim.why_not():
        pytest.skip(reason)
    with pytest.raises(OutOfMemoryError, match="the memory of sim:1 must hold") as info:
        unisono.launch(full_on_one, tmp_path, workers=2)
    assert info.value.rank == 1


@pytest.mark.slow
def test_a_run_on_a_device_tells_of_its_memory(accelerator, tmp_path):
    accelerator.limit(0, ROOM)
    make(directory=tmp_path).fit(DATA, batch_size=8, steps=6)
    (start,), first = events(tmp_path, "start"), events(tmp_path, "step")[0]
    assert start["machine"]["device_bytes"] == ROOM
    assert start["machine"]["device"] == "test accelerator"
    assert first["allocated_bytes"][0] >= 3 * 4 * (6 * 8 + 8 + 2 * 8)  # a part, and momentum
    view = LiveView(tmp_path).current()
    assert view.workers[0].device_bytes == first["allocated_bytes"][0]


def on_each_worker(directory):
    sim.install()
    keep = torch.empty(unisono.world().rank * 10**6 // 4, device=f"sim:{unisono.world().rank}")
    make(directory=directory).fit(DATA, batch_size=8, steps=6)
    return keep.nbytes


@pytest.mark.slow
def test_every_worker_has_an_entry(tmp_path):
    if reason := sim.why_not():
        pytest.skip(reason)
    unisono.launch(on_each_worker, tmp_path, workers=2)
    for step in events(tmp_path, "step"):
        if "allocated_bytes" in step:
            small, large = step["allocated_bytes"]
            assert 0.9e6 < large - small < 1.1e6
    assert "allocated_bytes" in events(tmp_path, "step")[0]


def test_looking_does_not_wait(accelerator):
    device = Device.of("sim:1", World())
    torch.zeros(1000, device="sim:1")
    with accelerator.synchronizations() as seen:
        assert device.memory() == (0, 4000)
    assert seen == []


def test_the_cpu_has_no_memory_of_its_own():
    free, total = host().room()
    assert free is None
    assert total > 10**8


def test_the_room_of_a_device_is_told(accelerator):
    accelerator.limit(2, 10_000)
    device = Device.of("sim:2", World())
    kept = torch.zeros(1000, device="sim:2")
    assert device.room() == (10_000 - kept.nbytes, 10_000)
