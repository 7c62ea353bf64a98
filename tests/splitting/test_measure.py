"""What units cost: activations of a sample, and what the sample leaves behind."""

import gc

import pytest
import torch
import torch.nn.functional as F
from tests.splitting.models import CNN, GPT, UNet
from torch import nn

from unisono.splitting.cut import split_of
from unisono.splitting.measure import UnitCosts
from unisono.splitting.split import split
from unisono.splitting.units import units_of

pytestmark = pytest.mark.usefixtures("optimizers_are_imported")


class Backwards(nn.Module):
    """Computes its layers the other way round, one of them twice, another never."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.never, self.middle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale=1):
        return self.first(self.last(self.middle(self.first(x * scale + self.shift))))


def test_units_are_in_the_order_in_which_they_compute():
    model = Backwards()
    units = units_of(model)
    sample = UnitCosts(model, units, torch.ones(2, 4))
    found = [units[at].name for at in sample.order]
    assert found == ["shift", "first", "never", "middle", "last"]


@pytest.mark.parametrize(
    "example", [torch.ones(2, 4), (torch.ones(2, 4), 2), {"x": torch.ones(2, 4)}]
)
def test_examples_are_tensors_tuples_or_dicts(example):
    UnitCosts(Backwards(), units_of(Backwards()), example)


def test_activations_are_those_that_the_backward_pass_keeps():
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2), nn.Linear(2, 1)
    )
    sample = UnitCosts(model, units_of(model), torch.ones(8, 4, requires_grad=True))
    # Each linear layer keeps its input; the first one's is the sample. `tanh` keeps its output.
    assert sample.activation_bytes == [(4 + 6) * 8 * 4, 0, 2 * 8 * 4]


@pytest.mark.parametrize("make", [CNN, GPT, UNet])
def test_a_sample_changes_nothing(make):
    torch.manual_seed(1)
    model = make()
    inputs, targets = model.batch(torch.Generator().manual_seed(1))
    F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    versions = [gradient._version for gradient in gradients]
    state = torch.random.get_rng_state()
    kept = inputs.clone()
    UnitCosts(model, units_of(model), inputs)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert [gradient._version for gradient in gradients] == versions
    assert torch.equal(inputs, kept)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_activations_move_the_cut():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 80))
    split(model, ["cpu", "cpu"])
    assert split_of(model).of_units == {"0": 0, "1": 0, "2": 0, "3": 1}
    wide = torch.ones(1000, 8, requires_grad=True)
    split(model, ["cpu", "cpu"], example=wide)
    assert split_of(model).of_units == {"0": 0, "1": 0, "2": 1, "3": 1}


def test_what_the_sample_was_computed_with_is_given_back(accelerator):
    gc.disable()
    model = split(GPT(), ["sim:0", "sim:1"])
    inputs = model.batch(torch.Generator().manual_seed(1))[0].to("sim:0")
    before = [torch.sim.memory_allocated(device) for device in range(2)]
    UnitCosts(model, units_of(model), inputs)
    assert [torch.sim.memory_allocated(device) for device in range(2)] == before
    split(model, ["sim:0", "sim:1"], example=inputs)
    total = sum(torch.sim.memory_allocated(device) for device in range(2))
    assert total == sum(before)  # whatever is where now
    split(model, ["sim:1", "sim:0"])  # what a graph refers to cannot be moved there


def test_a_split_model_is_measured_where_it_is(accelerator):
    model = split(GPT(), ["sim:0", "sim:1"])
    inputs = model.batch(torch.Generator().manual_seed(1))[0].to("sim:0")
    states = [generator.get_state() for generator in torch.sim.default_generators]
    split(model, ["sim:0", "sim:1"], example=inputs)
    after = [generator.get_state() for generator in torch.sim.default_generators]
    assert all(map(torch.equal, states, after))
    assert {str(p.device) for p in model.parameters()} == {"sim:0", "sim:1"}
    model(inputs)
