"""What a run's state says after it was put back."""

import json

import torch

from unisono.engine.state.optimizer_state import group_options
from unisono.engine.state.run_state import RunState
from unisono.engine.state.saved import apply_groups


def make():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    return RunState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def modes_in(state):
    facts, _ = state.collect({}, with_optimizer=False)
    return facts["modes"]


def test_a_layer_thawed_after_going_back_is_kept_as_thawed():
    state = make()
    weight = state.model[0].weight
    assert modes_in(state)["fixed"] == []
    weight.requires_grad_(False)
    frozen, tensors = state.collect({}, with_optimizer=False)
    weight.requires_grad_(True)
    assert modes_in(state)["fixed"] == []
    state.apply_rest(frozen, tensors)
    assert not weight.requires_grad
    assert modes_in(state)["fixed"] == ["0.weight"]
    state.apply_rest(frozen, tensors)
    weight.requires_grad_(True)  # as it was when modes were last named
    assert modes_in(state)["fixed"] == []


def test_a_replacement_that_begins_frozen_is_kept_as_thawed():
    frozen, state = make(), make()
    frozen.model[0].weight.requires_grad_(False)
    facts, tensors = frozen.collect({}, with_optimizer=False)
    assert modes_in(state)["fixed"] == []
    state.apply_rest(facts, tensors)
    state.model[0].weight.requires_grad_(True)
    assert modes_in(state)["fixed"] == []


def test_a_loop_left_in_a_validation_keeps_the_modes_of_its_steps():
    state = make()
    assert modes_in(state)["evaluating"] == []
    state.model.eval()
    left, _ = state.collect({}, with_optimizer=False, was_left=True)
    assert left["modes"]["evaluating"] == []
    assert modes_in(state)["evaluating"] == ["", "0", "1"]


def test_options_that_are_tensors_stay_tensors():
    def optimizer(*numbers):
        rate, *betas = map(torch.tensor, numbers)
        parameters = [torch.nn.Parameter(torch.zeros(2))]
        return torch.optim.Adam(parameters, lr=rate, betas=tuple(betas), foreach=False)

    saved, here = optimizer(0.1, 0.8, 0.9), optimizer(0.2, 0.7, 0.95)
    (group,) = here.param_groups
    tensors = [group["lr"], *group["betas"]]
    apply_groups(json.loads(json.dumps(group_options(saved))), here)
    assert type(group["betas"]) is tuple
    assert [id(one) for one in (group["lr"], *group["betas"])] == [*map(id, tensors)]
    assert torch.equal(torch.stack(tensors), torch.tensor([0.1, 0.8, 0.9]))
