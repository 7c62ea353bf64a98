"""What a program keeps with its run comes back as it was, from snapshots and from checkpoints."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity import cases
from torch import nn

import unisono
from unisono.checkpoint.contents import STATE_PREFIX
from unisono.errors import CheckpointError
from unisono.train.state import pack, unpack

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=5), PLAIN, max_size=5))
def test_plain_values_come_back_equal(state):
    packed, tensors = pack(state)
    back = {}
    unpack(json.loads(json.dumps(packed)), tensors, back)
    assert back == state


def test_tensors_come_back_wherever_they_are():
    state = {"mean": torch.arange(3.0), "many": {"a": [torch.tensor(7), {"b": torch.ones(2, 2)}]}}
    packed, tensors = pack(state)
    assert all(name.startswith(STATE_PREFIX) for name in tensors)
    back = {}
    unpack(json.loads(json.dumps(packed)), tensors, back)
    assert torch.equal(back["mean"], state["mean"])
    assert back["many"]["a"][0] == 7
    assert torch.equal(back["many"]["a"][1]["b"], torch.ones(2, 2))
    back["mean"].zero_()
    assert state["mean"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("keys", [[0, 1], ["$tensor"], ["$items", "x"], [None]])
def test_keys_that_json_would_change_come_back(keys):
    state = {"table": {key: number for number, key in enumerate(keys)}}
    packed, tensors = pack(state)
    back = {}
    unpack(json.loads(json.dumps(packed)), tensors, back)
    assert back == state


def test_objects_stay_and_load_their_state():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    parameter.grad = torch.ones(1)
    optimizer.step()
    packed, tensors = pack({"optimizer": optimizer})
    other_parameter = nn.Parameter(torch.zeros(1))
    other = torch.optim.SGD([other_parameter], lr=3.0, momentum=0.5)
    state = {"optimizer": other}
    unpack(json.loads(json.dumps(packed)), tensors, state)
    assert state["optimizer"] is other
    assert other.param_groups[0]["lr"] == 1.0
    assert other.state[other_parameter]["momentum_buffer"] == 1.0


def test_what_was_added_since_is_gone_but_objects_stay():
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1)
    state = {"best": 3, "new": 4, "schedule": schedule}
    unpack({"best": 2}, {}, state)
    assert state == {"best": 2, "schedule": schedule}


@pytest.mark.parametrize("value", [open, {1, 2}, b"bytes", object()])
def test_what_cannot_be_kept_is_refused_by_name(value):
    with pytest.raises(CheckpointError, match=r"`mine.*` in `run.state` must be"):
        pack({"mine": {"deep": [value]}})


def train(directory, steps, *, keeps=True):
    torch.manual_seed(3)
    model = cases.Cnn(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    run = unisono.Run(model, optimizer, shards=4, directory=directory)
    run.say = told.append
    if keeps:
        run.state.update(schedule=schedule, seen=0, average=torch.zeros(2, dtype=torch.float64))
    for step in run.steps(cases.images(), batch_size=cases.BATCH_SIZE, steps=steps):
        with step:
            for batch in step.shards:
                step.backward(cases.classify(model, batch))
        schedule.step()
        if keeps:
            run.state["seen"] += step.num_samples
            run.state["average"] = run.state["average"] * 0.5 + step.loss
    rate = optimizer.param_groups[0]["lr"]
    return rate, [p.detach().clone() for p in model.parameters()], dict(run.state)


told: list[str] = []


def test_a_run_that_is_resumed_goes_on_with_its_state(tmp_path):
    whole = train(None, 9)
    train(tmp_path, 4)
    resumed = train(tmp_path, 9)
    assert resumed[0] == whole[0]
    assert all(map(torch.equal, resumed[1], whole[1]))
    assert resumed[2]["seen"] == whole[2]["seen"]
    assert torch.equal(resumed[2]["average"], whole[2]["average"])
    assert not math.isclose(whole[0], 0.1)


def test_a_schedule_that_is_not_kept_is_told(tmp_path):
    told.clear()
    train(tmp_path, 2, keeps=False)
    assert len(told) == 1
    assert 'write `run.state["schedule"] = schedule`' in told[0]
    told.clear()
    train(tmp_path / "other", 2)
    assert told == []
