"""What a program keeps with its run comes back as it was, from snapshots and from checkpoints."""

import ctypes
import json
from collections import Counter, defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.classified import by_sign, cross_entropy, taken
from tests.promises import promise
from tests.replacements import wait_for_replacement
from torch import nn
from torch.optim import SGD, lr_scheduler

import unisono
from unisono.engine.state.optimizer_state import group_options
from unisono.engine.state.packing import (
    STATE_PREFIX,
    pack_state,
    unpack_number,
    unpack_state,
    unpacked_state,
)
from unisono.engine.state.saved import apply_groups
from unisono.errors import CheckpointError
from unisono.runtime.workers.context import context

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=5), PLAIN, max_size=5))
def test_plain_values_come_back_equal(state):
    assert there_and_back(state) == state


def test_tensors_come_back_wherever_they_are():
    state = {"mean": torch.arange(3.0), "many": {"a": [torch.tensor(7), {"b": torch.ones(2, 2)}]}}
    packed, tensors = pack_state(state)
    assert all(name.startswith(STATE_PREFIX) for name in tensors)
    back = {}
    unpack_state(json.loads(json.dumps(packed)), tensors, back)
    assert torch.equal(back["mean"], state["mean"])
    assert back["many"]["a"][0] == 7
    assert torch.equal(back["many"]["a"][1]["b"], torch.ones(2, 2))
    back["mean"].zero_()
    assert state["mean"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("keys", [[0, 1], ["$tensor"], ["$items", "x"], [None]])
def test_keys_that_json_would_change_come_back(keys):
    state = {"table": {key: number for number, key in enumerate(keys)}}
    assert there_and_back(state) == state


@promise("conditions.3")
def test_objects_stay_and_load_their_state():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    parameter.grad = torch.ones(1)
    optimizer.step()
    packed, tensors = pack_state({"optimizer": optimizer})
    other_parameter = nn.Parameter(torch.zeros(1))
    other = torch.optim.SGD([other_parameter], lr=3.0, momentum=0.5)
    state = {"optimizer": other}
    unpack_state(json.loads(json.dumps(packed)), tensors, state)
    assert state["optimizer"] is other
    assert other.param_groups[0]["lr"] == 1.0
    assert other.state[other_parameter]["momentum_buffer"] == 1.0


@pytest.mark.parametrize(
    "there",
    [
        torch.zeros(2, 3),
        torch.zeros(3, 2).T.contiguous().requires_grad_(),
        nn.Parameter(torch.zeros(2, 3)),
        torch.zeros(()),
        np.zeros((2, 3)),
        np.zeros((2, 3), order="F"),
    ],
    ids=lambda there: f"{type(there).__name__}{tuple(there.shape)}",
)
def test_a_tensor_or_array_stays_the_programs_own(there):
    packed, tensors = pack_state({"x": there})
    tensors = {name: tensor.clone() + 1 for name, tensor in tensors.items()}
    state = {"x": there}
    unpack_state(packed, tensors, state)
    assert state["x"] is there
    assert (there == 1).all()


def test_what_a_view_shows_is_not_overwritten():
    rows, table = torch.zeros(2, 3), np.zeros((2, 3))
    packed, tensors = pack_state({"row": torch.ones(3), "array": np.ones(3)})
    state = {"row": rows[0], "array": table[0]}
    unpack_state(packed, tensors, state)
    assert state["row"].tolist() == state["array"].tolist() == [1, 1, 1]
    assert not rows.any()
    assert not table.any()


def test_what_was_added_since_is_gone_but_objects_stay():
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1)
    state = {"best": 3, "new": 4, "schedule": schedule}
    unpack_state({"best": 2}, {}, state)
    assert state == {"best": 2, "schedule": schedule}


NUMPYS = "bool float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"


def there_and_back(state):
    packed, tensors = pack_state(state)
    back = {}
    unpack_state(
        json.loads(json.dumps(packed)), {key: t.clone() for key, t in tensors.items()}, back
    )
    return back


@pytest.mark.parametrize(
    "value",
    [
        (),
        (1, [2, (3,)]),
        torch.Size([2, 3]),
        Counter({30: 1, 60: 2}),
        Counter(["a", "a", "$b"]),
        Counter(np.array([2, 2, 4])),
        defaultdict(int, {3: 4}),
        defaultdict(list, {"a": [1]}),
        defaultdict(None, {"a": 1}),
        deque([1, 2.5], maxlen=3),
        deque(),
        np.float64(0.1),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        {"$tuple": 1},
        {"a": {}, "b": []},
    ],
    ids=repr,
)
def test_containers_and_numbers_keep_their_kind(value):
    (back,) = there_and_back({"x": value}).values()
    assert back == value
    assert type(back) is (tuple if isinstance(value, torch.Size) else type(value))
    assert getattr(back, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(back, "default_factory", None) == getattr(value, "default_factory", None)
    assert json.dumps(pack_state({"x": back})[0]) == json.dumps(pack_state({"x": value})[0])


@pytest.mark.parametrize("name", NUMPYS.split())
def test_arrays_come_back_in_their_dtype(name):
    array = np.array([[0, 1, 1], [1, 0, 1]], name)
    for value in (
        array,
        array.T,
        array[:, ::-1],
        array.astype(array.dtype.newbyteorder()),
        array[0, 1:2].reshape(()),
    ):
        back = there_and_back({"x": {"deep": [value]}})["x"]["deep"][0]
        assert back.dtype == array.dtype
        assert back.shape == value.shape
        assert np.array_equal(back, value)
        back += back


def test_two_tensors_never_share_a_name():
    state = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), "a/b+": torch.tensor(3)}
    back = there_and_back(state)
    assert (back["a"]["b"], back["a/b"], back["a/b+"]) == (1, 2, 3)


@pytest.mark.parametrize(
    "packed",
    [
        {"$new": 1},
        {"$tensor": "nowhere"},
        {"$tensor": []},
        {"$tuple": 3},
        {"$items": [[[], 1]]},
        {"$counter": [1]},
        {"$number": ["float128", 1]},
        {"$number": ["int8", 300]},
        {"$number": []},
        {"$deque": [-1, []]},
        {"$default": ["exec", []]},
        {"$array": 3},
    ],
    ids=repr,
)
def test_what_was_not_written_here_is_refused(packed):
    with pytest.raises(CheckpointError, match="must have the form that this version writes"):
        unpacked_state({"x": [packed]}, {})


def test_an_option_that_was_not_written_here_is_refused():
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=np.float32(0.1))
    (packed,) = group_options(optimizer)
    assert type(unpack_number(packed["lr"])) is np.float32
    for number in (["float128", 1], ["int8", 300], []):
        with pytest.raises(CheckpointError, match="must have the form that this version writes"):
            apply_groups([{**packed, "lr": {"$number": number}}], optimizer)
    assert optimizer.param_groups[0]["lr"] == np.float32(0.1)


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 8]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 6),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, 1, 6),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "cyclic by function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1, 4), lr_scheduler.MultiStepLR(o, [2, 4])], [5]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1, 4), lr_scheduler.MultiStepLR(o, [2, 6])]
    ),
}


def test_every_schedule_of_torch_is_here():
    classes = {
        kind
        for kind in vars(lr_scheduler).values()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    seen = {type(make(optimizer)) for make in SCHEDULES.values()}
    assert {kind.__name__ for kind in classes - seen} <= {"LRScheduler", "_LRScheduler"}


@promise("conditions.3")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stop", [0, 3, 6])
@pytest.mark.filterwarnings("ignore")
def test_every_schedule_goes_on_with_the_same_rates(name, stop):
    def make():
        groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in "ab"]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        optimizer.step()
        return optimizer, SCHEDULES[name](optimizer)

    def step(optimizer, schedule, count):
        rates = []
        for _ in range(count):
            schedule.step(1.0) if name == "plateau" else schedule.step()
            rates.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        return rates

    whole = step(*make(), 12)
    optimizer, schedule = make()
    step(optimizer, schedule, stop)
    packed, tensors = pack_state({"schedule": schedule})
    other, resumed = make()
    apply_groups(json.loads(json.dumps(group_options(optimizer))), other)
    unpack_state(json.loads(json.dumps(packed)), tensors, {"schedule": resumed})
    assert step(other, resumed, 12 - stop) == whole[stop:]


@pytest.mark.parametrize(
    "value", [open, {open}, b"bytes", object(), {(1, 2): 3}, defaultdict(lambda: 3), np.array("a")]
)
def test_what_cannot_be_kept_is_refused_by_name(value):
    with pytest.raises(CheckpointError, match=r"`mine.*` in `run.state` must be"):
        pack_state({"mine": {"deep": [value]}})


def test_keys_of_the_state_are_strings():
    with pytest.raises(CheckpointError, match=r"`run.state` must be strings, but one is 7"):
        pack_state({7: "seven"})


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a variable", "the state", "an object made in C"])
def test_a_schedule_that_is_not_kept_is_told(tmp_path, capsys, where):
    torch.manual_seed(0)  # else a line tells of weights that were drawn without
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    run = unisono.Run(model, optimizer, shards=4, directory=tmp_path)
    if where == "the state":
        run.state["schedule"] = schedule
    if where != "a variable":
        schedule = ctypes.py_object(schedule)
    for _ in taken(run, cross_entropy, by_sign(), batch_size=8, steps=2):
        getattr(schedule, "value", schedule).step()
    told = [line for line in capsys.readouterr().err.splitlines() if "schedule steps" in line]
    assert len(told) == (where == "an object made in C")
    assert all('write `run.state["schedule"] = schedule`' in line for line in told)


def adding(steps, directory, way):
    """Add to a tensor of the program's in the state, or put another one there, or both."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=2, directory=directory)
    own = run.state["sum"] = torch.zeros(2)
    rows = torch.utils.data.TensorDataset(torch.randn(16, 3))
    for step in run.steps(rows, batch_size=4, steps=steps):
        with step:
            for (batch,) in step.shards:
                step.backward(model(batch).square().mean())
        if not step.is_done:
            continue
        if "new" in way:
            run.state["sum"] = run.state["sum"] + 1
        if "own" in way:
            own += 10
        if step.number == 6:
            wait_for_replacement(context().team())
    return run.state["sum"].tolist(), own.tolist(), run.state["sum"] is own


@promise("nothing-lost.2")
@pytest.mark.slow
@pytest.mark.parametrize("way", ["own", "new", "new and own"])
def test_a_tensor_in_the_state_and_the_programs_own_are_as_if_undisturbed(
    tmp_path, monkeypatch, way
):
    expected = adding(9, None, way)
    adding(4, tmp_path / "run", way)
    assert adding(9, tmp_path / "run", way) == expected
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=5,at=update")
    assert unisono.launch(adding, 9, None, way, workers=2) == [expected] * 2
