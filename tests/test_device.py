"""Which device a worker computes on, and how batches come there."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from unisono.runtime.device import Device, host
from unisono.runtime.world import WORKERS_PER_GPU_VARIABLE, World


def worker(local_rank, count):
    return World(local_rank, count, local_rank, count)


def test_a_machine_without_gpus_computes_on_the_cpu():
    device = Device.of("auto", World())
    assert (device.name, device.is_host) == ("cpu", True)
    batch = [torch.ones(1), "text"]
    assert device.move(batch) is batch


@pytest.mark.parametrize("name", ["gpu", "sims", "cuda:x", 3.5, [1], None, ""])
def test_what_names_no_device_is_refused(name):
    with pytest.raises(TypeError, match="`device` must be"):
        Device.of(name, World())


@pytest.mark.parametrize("name", ["cuda", "xpu:0", "meta"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(ValueError, match="torch finds no"):
        Device.of(name, World())


def test_each_worker_has_its_device(accelerator, monkeypatch):
    assert [Device.of("sim", worker(n, 4)).name for n in range(4)] == [f"sim:{n}" for n in range(4)]
    assert Device.of("sim:2", worker(1, 2)).name == "sim:2"
    assert torch.accelerator.current_device_index() == 2
    with pytest.raises(ValueError, match="worker 4 of this host would need sim:4 and there are 4"):
        Device.of("sim", worker(4, 5))
    with pytest.raises(ValueError, match="sim:9"):
        Device.of("sim:9", World())
    monkeypatch.setenv(WORKERS_PER_GPU_VARIABLE, "2")
    assert [Device.of("sim", worker(n, 5)).torch.index for n in range(5)] == [0, 0, 1, 1, 2]
    monkeypatch.setenv(WORKERS_PER_GPU_VARIABLE, "0")
    with pytest.raises(ValueError, match=r"`UNISONO_WORKERS_PER_GPU` must be at least 1, but is 0"):
        Device.of("sim", worker(0, 1))


def test_a_device_has_a_model(accelerator):
    assert Device.of("sim:1", World()).model == torch.sim.get_device_name(1)
    assert host().model == ""


def test_what_is_there_stays_and_what_moves_itself_is_asked_to(accelerator):
    device, there = Device.of("sim", World()), torch.arange(3.0, device="sim")
    moved, packed = device.move([there, pack_sequence([torch.arange(3.0)])])
    assert moved is there
    assert packed.data.device.type == "sim"


def test_the_generators_of_host_and_device_are_seeded_and_put_back(accelerator):
    device = Device.of("sim:1", World())
    torch.manual_seed(1)
    before = torch.rand(2, device="sim:1").tolist()
    state = torch.get_rng_state()
    with device.generators_put_back():
        device.seed(5)
        drawn = torch.rand(2).tolist(), torch.rand(2, device="sim:1").tolist()
        device.seed(5)
        assert (torch.rand(2).tolist(), torch.rand(2, device="sim:1").tolist()) == drawn
    assert torch.equal(torch.get_rng_state(), state)
    after = torch.rand(2, device="sim:1").tolist()
    torch.manual_seed(1)
    assert torch.rand(2, device="sim:1").tolist() == before
    assert torch.rand(2, device="sim:1").tolist() == after


def test_copies_are_made_when_they_have_been_waited_for(accelerator):
    device = Device.of("sim", World())
    copies, there = device.copies(), torch.zeros(4)
    undo = device.register(there)
    copies.to_host(there, torch.ones(4, device="sim"))
    assert there.tolist() == [0, 0, 0, 0]
    with accelerator.synchronizations() as seen:
        copies.wait()
    assert there.tolist() == [1, 1, 1, 1]
    assert seen == []
    here = torch.zeros(4, device="sim")
    copies.to_device(here, there)
    assert (here + 1).tolist() == [2, 2, 2, 2]
    undo()


def test_copies_of_the_cpu_are_made_at_once():
    copies, there = host().copies(), torch.zeros(2)
    copies.to_host(there, torch.ones(2))
    assert there.tolist() == [1, 1]
    copies.wait()
    assert host().register(there) is None


class Clock:
    """A clock that only sleeping moves on."""

    def __init__(self):
        self.now_s, self.num_naps = 0.0, 0

    def perf_counter(self):
        self.now_s += 1e-5  # to look takes a moment
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        self.num_naps += 1


@pytest.mark.parametrize("done_after_s", [0.01, 1.0, 600.0])
def test_a_device_that_takes_long_is_asked_ever_less_often(accelerator, monkeypatch, done_after_s):
    clock = Clock()
    monkeypatch.setattr("unisono.runtime.device.time", clock)
    copies = Device.of("sim", World()).copies()
    copies.to_host(torch.zeros(1), torch.ones(1, device="sim"))

    class Event:
        def query(self):
            return clock.now_s >= done_after_s

    copies._busy = {copies.device: Event()}
    copies.wait()
    assert clock.now_s <= 1.02 * done_after_s + 1e-3
    assert clock.num_naps < 1_400  # else it would seem to be alive, if it never answers
