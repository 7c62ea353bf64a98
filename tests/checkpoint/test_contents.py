"""What a checkpoint says comes back whole, or nothing changes."""

import functools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from tests.checkpoint.taken import files_of_run
from torch import nn

from unisono.engine.exchange.snapshots import as_bytes, describe_extras, from_bytes
from unisono.engine.state.contents import digest_of
from unisono.engine.state.saved import CheckpointData, apply, apply_groups
from unisono.errors import CheckpointError
from unisono.runtime.checkpoint.sealed import Sealed

FACTS = {
    "position": {"step": 3, "epoch": 0, "batch": 3},
    "identity": {"seed": 1},
    "state": {"best": 0.5},
    "last": {"loss": 0.25},
}


def make(seed, num_steps):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1), betas=(0.8, 0.9))
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@functools.cache
def taken():
    return files_of_run(*make(0, 2), {})


def files(facts=FACTS, **changes):
    run = json.dumps(facts | json.loads(taken()["run.json"])).encode()
    made = {name: data() if callable(data) else data for name, data in changes.items()}
    return taken() | {"run.json": run} | made


def snapshot_of(files):
    return CheckpointData.from_files({name: Sealed.of([data]) for name, data in files.items()})


def changed(**changes):
    """Make run.json with other facts, when a test runs: nothing is trained at import."""

    def make_json():
        facts = json.loads(files()["run.json"]) | changes
        return json.dumps({k: value for k, value in facts.items() if value is not None}).encode()

    return make_json


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_state_that_was_taken_is_put_back(num_steps):
    there, here = make(0, 2), make(1, num_steps)
    snapshot = snapshot_of(files_of_run(*there, FACTS))
    apply(snapshot, *here)
    assert digest_of(*here) == digest_of(*there)
    assert here[1].param_groups[0]["lr"] == 0.1
    assert here[1].param_groups[0]["betas"] == (0.8, 0.9)
    assert {name: snapshot.facts[name] for name in FACTS} == FACTS


def test_the_users_tensors_are_no_state_of_the_optimizer():
    there, here = make(0, 2), make(1, 1)
    own = {"mean": torch.arange(3.0), "a/b": torch.tensor(7), "0.weight": torch.zeros(999)}
    read = snapshot_of(files_of_run(*there, FACTS, own))
    assert all(torch.equal(read.others[f"run.state/{name}"], own[name]) for name in own)
    assert len(read.others) == len(own) + len(snapshot_of(files()).others)
    apply(read, *here)
    assert digest_of(*here) == digest_of(*there)


def test_an_old_checkpoint_has_no_state():
    old = {name: FACTS[name] for name in ("position", "identity")}
    snapshot = snapshot_of(files(old))
    there_later = ("state", "last", "strides", "modes")
    assert [snapshot.facts[name] for name in there_later] == [{}, {}, {}, {}]


@pytest.mark.parametrize("modes", [{}, {"fixed": ["0.weight", "9"], "evaluating": ["1"]}])
def test_layers_are_as_they_were_where_the_file_says_it(modes):
    model, optimizer = make(0, 0)
    model[0].requires_grad_(False)
    model[0].eval()
    apply(snapshot_of(files(FACTS | {"modes": modes})), model, optimizer)
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad is bool(modes)
    assert model[0].training is bool(modes)
    assert model[1].training is not bool(modes)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        changed(format=2),
        changed(position=None),
        changed(position={"step": 1, "epoch": 0}),
        changed(position={"step": -1, "epoch": 0, "batch": 0}),
        changed(position={"step": True, "epoch": 0, "batch": 0}),
        changed(identity=[]),
        changed(groups={}),
        changed(groups=[1]),
        changed(numbers={"0.weight": 3}),
        changed(state=[]),
        changed(last=3),
        changed(strides=3),
        changed(modes=[]),
        changed(modes={"fixed": []}),
        changed(modes={"fixed": [], "evaluating": [3]}),
    ],
    ids=range(21),
)
def test_another_form_is_refused(text):
    with pytest.raises(CheckpointError, match="must have"):
        snapshot_of(files(**{"run.json": text}))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("data", [b"", b"\xff" * 99, b"\2\0\0\0\0\0\0\0[]"])
def test_a_file_that_is_not_safetensors_is_refused(name, data):
    with pytest.raises(CheckpointError, match="must have their formats"):
        snapshot_of(files(**{name: data}))


def test_state_within_lists_and_dicts_comes_back():
    there, here = make(0, 2), make(1, 1)
    for at, parameter in enumerate(there[0].parameters()):
        there[1].state[parameter]["past"] = [torch.full((2,), at), {"deep": torch.ones(at)}]
        there[1].state[parameter].update({"past/0": torch.tensor(at + 9), "shape": (at, 2)})
        there[1].state[parameter]["larger than its parameter"] = torch.arange(900.0)
    apply(snapshot_of(files_of_run(*there, FACTS)), *here)
    assert digest_of(*here) == digest_of(*there)
    for at, parameter in enumerate(here[0].parameters()):
        state = here[1].state[parameter]
        assert (state["shape"], state["past/0"].item()) == ((at, 2), at + 9)
        assert state["past"][0].tolist() == [at, at]
        assert state["past"][1]["deep"].tolist() == [1.0] * at


def copied(tensor):
    """Copy a tensor with its strides, even where elements share memory."""
    memory = tensor.untyped_storage().clone()
    return torch.tensor([]).set_(memory, 0, tensor.shape, tensor.stride())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
        torch.arange(48.0).reshape(2, 6, 4)[:, ::2].permute(2, 0, 1),
        torch.arange(24.0).reshape(2, 1, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(24.0).reshape(2, 3, 4, 1).as_strided((2, 3, 4, 1), (12, 4, 1, 7)),
        torch.zeros(0, 3).T,
        torch.arange(3.0).expand(2, 3),
        torch.tensor(1.0),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_state_and_the_users_tensors_lie_as_their_copies_do(tensor):
    there, here = make(0, 2), make(1, 1)
    there[1].state[there[0][0].bias].update(mean=tensor, many=[copied(tensor)])
    snapshot = snapshot_of(files_of_run(*there, FACTS, {"own": tensor}))
    apply(snapshot, *here)
    state = here[1].state[here[0][0].bias]
    from_memory = from_bytes(bytearray(as_bytes(tensor)), describe_extras({"own": tensor})[0])
    for seen in (state["mean"], state["many"][0], snapshot.others["run.state/own"], from_memory):
        assert torch.equal(seen, tensor)
        assert seen.stride() == tensor.clone().stride()
        seen += 1
    assert all(t.data_ptr() % 64 == 0 for t in (state["mean"], state["many"][0]))


def strided(*stride):
    return changed(strides={"exp_avg/0.weight": list(stride)})


@pytest.mark.parametrize(
    "run",
    [
        strided(),
        strided(1),
        strided(1, 1),
        strided(0, 0),
        strided(1 << 40, 1),
        strided(-3, 1),
        strided(3.0, 1),
        strided(True, 3),
        changed(strides={"exp_avg/0.weight": 3}),
        changed(strides=[]),
    ],
    ids=range(10),
)
def test_strides_are_not_believed(run):
    with pytest.raises(CheckpointError, match=r"must (put its shape|have the form)"):
        snapshot_of(files(**{"run.json": run}))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("shape", [[1 << 40], [1 << 40, 1 << 40, 0, 4], [1 << 62, 4, 1 << 62]])
def test_a_file_is_believed_no_more_bytes_than_it_has(name, shape):
    head = {"exp_avg/0.bias": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}
    text = json.dumps(head).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(16)
    with pytest.raises(CheckpointError, match="must have their formats"):
        snapshot_of(files(**{name: data}))


def with_optimizer(change):
    return {"optimizer.safetensors": lambda: save(load(taken()["optimizer.safetensors"]) | change)}


def with_model(change):
    def make():
        tensors = load(taken()["model.safetensors"]) | change
        return save({name: tensor for name, tensor in tensors.items() if tensor is not None})

    return {"model.safetensors": make}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_model({"0.weight": None}), r"`0.weight` are only in the model"),
        (with_model({"../evil": torch.zeros(1)}), r"`../evil` only in the checkpoint"),
        (with_model({"0.weight": torch.zeros(3, 2)}), r"`0.weight` is .* shape \(3, 2\) in"),
        (with_model({"0.bias": torch.zeros(2).double()}), r"`0.bias` is torch.float64"),
        (with_optimizer({"exp_avg/9.weight": torch.zeros(1)}), "must update `9.weight`"),
        (with_optimizer({"exp_avg": torch.zeros(1)}), "KEY/PARAMETER, but one is `exp_avg`"),
        (with_optimizer({"__class__/run.state": torch.zeros(1)}), "must update `run.state`"),
        (with_optimizer({"run.statex": torch.zeros(1)}), "but one is `run.statex`"),
        ({"run.json": changed(numbers={"9": {"step": 1}})}, "must update `9`"),
        (
            {"run.json": changed(strides={"exp_avg/0.weight": [1, 2]}, groups=[])},
            "must have 0 parameter groups",
        ),
        (
            {"run.json": changed(numbers={"0.bias": {"a": {"$tensor": "no"}}})},
            "state must have the form",
        ),
        ({"run.json": changed(groups=[])}, "must have 0 parameter groups .* add those that were"),
        ({"run.json": changed(groups=[{"lr": "x"}])}, "`lr` of parameter group 0 must be 'x'"),
        ({"run.json": changed(groups=[{"betas": 3}])}, "`betas` of parameter group 0 must be 3"),
        ({"run.json": changed(groups=[{"lr": 10**400}])}, "`lr` of parameter group 0"),
    ],
    ids=range(15),
)
def test_what_does_not_fit_changes_nothing(change, message):
    here = make(1, 1)
    before = digest_of(*here), str(here[1].param_groups)
    snapshot = snapshot_of(files(**change))
    with pytest.raises(CheckpointError, match=message):
        apply(snapshot, *here)
    assert (digest_of(*here), str(here[1].param_groups)) == before


def test_the_state_of_parameters_that_are_not_updated_is_refused():
    (model, _), snapshot = make(1, 0), snapshot_of(files())
    part = torch.optim.AdamW(model[0].parameters(), lr=0.2)
    before = digest_of(model, part)
    with pytest.raises(CheckpointError, match=r"must update `1\.bias` as .* its own `directory`"):
        apply(snapshot, model, part)
    assert digest_of(model, part) == before


def test_groups_alone_are_put_back_or_left_alone():
    optimizer = torch.optim.SGD([torch.zeros(2)], lr=torch.tensor(0.5), momentum=0.9)
    apply_groups([{"lr": 0.25, "momentum": 0, "foreach": True, "params": [9]}], optimizer)
    group = optimizer.param_groups[0]
    assert isinstance(group["lr"], torch.Tensor)
    assert (group["lr"].item(), group["momentum"], group["foreach"]) == (0.25, 0, True)
    for groups in ([{"momentum": 0.5, "lr": None}], [{}, {}], [{"momentum": 0.5, "lr": "high"}]):
        with pytest.raises(CheckpointError):
            apply_groups(groups, optimizer)
        assert group["momentum"] == 0


ODD = st.sampled_from(
    [None, True, -1, 2**63, 10**4000, math.inf, -math.inf, math.nan, "", "\ud800\0\x1b[31m"]
)
SAID = st.recursive(
    ODD | st.floats() | st.text(max_size=4),
    lambda said: (
        st.lists(said, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["", "0.weight", "step", "$tensor", "$tuple", "$items", "$deque", "lr"]
            ),
            said,
            max_size=3,
        )
    ),
)


def places_in(said, path=()):
    """Give the place of every value within JSON."""
    yield path
    items = said if isinstance(said, list) else ()
    for key, value in said.items() if isinstance(said, dict) else enumerate(items):
        yield from places_in(value, (*path, key))


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_no_facts_make_us_fall(data):
    """Somebody may write what they like into run.json and confirm it in commit.json."""
    facts = json.loads(files()["run.json"])
    *path, last = data.draw(st.sampled_from([path for path in places_in(facts) if path]))
    parent = facts
    for key in path:
        parent = parent[key]
    parent[last] = data.draw(SAID)
    here, told = make(1, 1), ""
    try:
        apply(snapshot_of(files(**{"run.json": json.dumps(facts).encode()})), *here)
    except CheckpointError as error:
        told = str(error)
    assert told.isprintable()
    assert len(told) < 1000
    assert not told or digest_of(*here) == digest_of(*make(1, 1))
