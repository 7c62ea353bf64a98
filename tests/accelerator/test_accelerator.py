"""The test accelerator: four devices that refuse what a GPU refuses, or would do wrong."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from tests.accelerator import sim
from tests.threads import in_threads
from torch import nn

pytestmark = pytest.mark.usefixtures("accelerator")
ROOT = Path(__file__).parents[2]


# Devices


def test_there_are_four_devices():
    assert torch.sim.device_count() == torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.get_device_module("sim").current_device() == 0
    with torch.sim.device(2):
        assert torch.ones(1, device="sim").device == torch.device("sim:2")
    assert torch.ones(1, device="sim").device == torch.device("sim:0")
    with pytest.raises(RuntimeError, match="there is no sim:4"):
        torch.ones(1, device="sim:4")


MIXES = {
    "add": lambda a, b: a + b,
    "add_in_place": lambda a, b: a.add_(b),
    "matmul": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "foreach": lambda a, b: torch._foreach_add_([a], [b]),
    "loss": torch.nn.functional.mse_loss,
    "linear": torch.nn.functional.linear,
    "out": lambda a, b: torch.add(a, a, out=b),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=list(MIXES))
@pytest.mark.parametrize("other", ["sim:1", "cpu"])
def test_devices_are_not_mixed(mix, other):
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(3, 3, device="sim:0"), torch.ones(3, 3, device=other))


def test_a_number_may_be_on_the_cpu():
    assert (torch.ones(2, device="sim:1") * torch.tensor(3.0)).tolist() == [3, 3]
    assert torch.full((2,), 3.0, device="sim:1").tolist() == [3, 3]


def test_memory_of_a_device_is_no_array():
    with pytest.raises(TypeError, match="sim"):
        torch.ones(2, device="sim:0").numpy()


def test_a_generator_of_another_device_is_refused():
    for device in ("cpu", "sim:1"):
        with pytest.raises(RuntimeError, match=r"enerator"):
            torch.empty(2, device="sim:0").normal_(generator=torch.Generator(device))


def test_a_backward_pass_goes_over_several_devices():
    models = [nn.Linear(4, 2).to(f"sim:{i}") for i in range(3)]
    losses = [model(torch.ones(2, 4, device=f"sim:{i}")).sum() for i, model in enumerate(models)]
    torch.autograd.backward(losses)
    assert [model.weight.grad.device.index for model in models] == [0, 1, 2]

    first, second = nn.Linear(4, 8).to("sim:3"), nn.Linear(8, 2).to("sim:1")
    second(first(torch.ones(3, 4, device="sim:3")).to("sim:1")).sum().backward()
    assert first.weight.grad.device.index == 3
    assert second.weight.grad.device.index == 1


# Tensors


def test_views_share_memory_and_new_tensors_do_not():
    tensor = torch.arange(12.0, device="sim:1").view(3, 4)
    tensor[1].zero_()
    tensor.T[0] += 1
    tensor.unfold(1, 2, 2)[:, 1] = 7
    expected = torch.arange(12.0).view(3, 4)
    expected[1].zero_()
    expected.T[0] += 1
    expected.unfold(1, 2, 2)[:, 1] = 7
    assert torch.equal(tensor.cpu(), expected)
    twin = copy.deepcopy(tensor)
    twin.zero_()
    assert torch.equal(tensor.cpu(), expected)
    assert twin.device == tensor.device


def test_results_are_written_where_they_are_asked_for():
    out = torch.empty(0, device="sim:1")
    torch.add(torch.ones(5, device="sim:1"), 1, out=out)
    assert out.tolist() == [2] * 5
    out.resize_(2, 2)
    assert out.tolist() == [[2, 2], [2, 2]]
    values, places = (
        torch.empty(0, device="sim:1"),
        torch.empty(0, dtype=torch.long, device="sim:1"),
    )
    torch.max(torch.tensor([[1.0, 5.0]], device="sim:1"), 1, out=(values, places))
    assert (values.tolist(), places.tolist()) == ([5], [1])


def test_conjugates_and_negatives_are_views():
    numbers = torch.complex(torch.ones(2), torch.arange(2.0)).to("sim:1")
    expected = numbers.cpu().conj()
    assert torch.equal(numbers.conj().cpu(), expected)
    assert torch.equal(numbers.conj().imag.cpu(), expected.imag)
    assert torch.equal((numbers.conj() * numbers).cpu(), expected * numbers.cpu())


def test_data_may_be_a_view_of_flat_memory():
    model = nn.Linear(3, 2).to("sim:2")
    values = model.weight.detach().cpu()
    flat = torch.zeros(8, device="sim:2")
    flat[:6] = model.weight.detach().flatten()
    model.weight.data = flat[:6].view(2, 3)
    flat += 1
    assert torch.equal(model.weight.detach().cpu(), values + 1)


def test_states_travel_between_the_host_and_devices():
    here, there = nn.BatchNorm1d(3), nn.BatchNorm1d(3).to("sim:1")
    here(torch.randn(5, 3))
    there.load_state_dict(here.state_dict())
    assert there.running_mean.device == torch.device("sim:1")
    assert torch.equal(there.state_dict()["running_mean"].cpu(), here.running_mean)


def test_memory_that_nobody_wrote_is_not_a_number():
    assert torch.empty(3, device="sim:0").isnan().all()


# Memory


def test_a_device_has_as_much_memory_as_it_is_given():
    sim.limit(1, 1000)
    kept = torch.zeros(200, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:1 .* 400 bytes .* 800 of 1000"):
        torch.zeros(100, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError):
        kept + 1
    torch.zeros(100, device="sim:0")
    del kept
    torch.zeros(100, device="sim:1")
    sim.limit(1, None)
    torch.zeros(10**6, device="sim:1")


def test_memory_is_counted():
    assert torch.sim.memory_allocated(1) == 0
    tensor = torch.zeros(100, device="sim:1")
    assert torch.sim.memory_allocated(1) == torch.accelerator.memory_allocated(1) == 400
    doubled = tensor * 2
    del doubled
    assert torch.sim.memory_allocated(1) == 400
    assert torch.sim.max_memory_allocated(1) == 800
    torch.sim.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_allocated(1) == 400
    assert torch.sim.memory_allocated(0) == 0
    del tensor
    assert torch.sim.memory_allocated(1) == 0


# Threads and processes


def move_and_add(number):
    device = f"sim:{number}"
    for _ in range(100):
        there = torch.from_numpy(numpy.ones(9)).to(device, non_blocking=True)
        torch.empty(9).copy_(there + 1, non_blocking=True)
        del there
    return (torch.ones(2, device=device) + 1).tolist()


def test_threads_use_devices_beside_each_other():
    assert in_threads(4, move_and_add) == [[2, 2]] * 4


def test_a_forked_process_trains():
    net = nn.Linear(3, 1).to("sim:1")
    net(torch.ones(2, 3, device="sim:1")).sum().backward()
    assert net.weight.grad.tolist() == [[2, 2, 2]]


def in_a_spawned_process(rank, device):
    sim.install()
    sim.install()
    assert torch.ones(3, device=device).sum().item() == 3


@pytest.mark.slow
def test_a_spawned_process_installs_its_own():
    torch.multiprocessing.spawn(in_a_spawned_process, ("sim:2",), nprocs=2)


@pytest.mark.slow
def test_nothing_is_loaded_before_it_is_asked_for():
    imports = "import torch; from tests.accelerator import sim; sim.why_not()"
    command = [sys.executable, "-c", f"{imports}; print(hasattr(torch, 'sim'))"]
    done = subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    assert done.stdout == b"False\n"
