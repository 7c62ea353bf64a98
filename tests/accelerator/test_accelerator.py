"""The test accelerator: four devices that refuse what a GPU refuses, or would do wrong."""

import pytest
import torch
from tests.accelerator import sim

pytestmark = pytest.mark.usefixtures("accelerator")


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


def test_memory_of_a_device_is_no_array():
    with pytest.raises(TypeError, match="sim"):
        torch.ones(2, device="sim:0").numpy()


def test_a_generator_of_another_device_is_refused():
    for device in ("cpu", "sim:1"):
        with pytest.raises(RuntimeError, match=r"enerator"):
            torch.empty(2, device="sim:0").normal_(generator=torch.Generator(device))


def test_memory_that_nobody_wrote_is_not_a_number():
    assert torch.empty(3, device="sim:0").isnan().all()


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
