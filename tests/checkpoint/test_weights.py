"""Weights fit a model whatever wraps it, or the model stays as it is."""

import errno
import io
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from tests.checkpoint.taken import files_of_run
from torch import nn

from unisono.engine.state import load
from unisono.engine.state.load import load_weights, plain_weights, save_weights
from unisono.errors import CheckpointError
from unisono.runtime.checkpoint.run_directory import RunDirectory


def plain(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))


class Ddp(nn.Module):
    """Gives names the prefix that DistributedDataParallel gives them, without its processes."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def compiled(model):
    return torch.compile(model, backend="eager")


def partly_compiled(model):
    model[2] = compiled(model[2])
    return model


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self, is_tied=True):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)
        if is_tied:
            self.last.weight = self.first.weight


WRAPPERS = {
    "plain": lambda model: model,
    "DDP": Ddp,
    "compiled": compiled,
    "DDP of compiled": lambda model: Ddp(compiled(model)),
    "compiled of DDP": lambda model: compiled(Ddp(model)),
    "DDP of compiled of DDP": lambda model: Ddp(compiled(Ddp(model))),
    "partly compiled": partly_compiled,
    "DDP of partly compiled": lambda model: Ddp(partly_compiled(model)),
}
SAVERS = {
    "by us": save_weights,
    "safetensors": lambda model, path: save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path
    ),
    "torch": lambda model, path: torch.save(model.state_dict(), path),
    "torch, long ago": lambda model, path: torch.save(
        model.state_dict(), path, _use_new_zipfile_serialization=False
    ),
}


def bits(model):
    return {
        name: (str(tensor.dtype), tensor.shape, bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in plain_weights(model).items()
    }


# Every wrapper meets every other, and both meet every saver, in a quarter of all triples.
MEETINGS = [
    (there, here, list(SAVERS)[(row + column) % len(SAVERS)])
    for row, there in enumerate(WRAPPERS)
    for column, here in enumerate(WRAPPERS)
]


@pytest.mark.parametrize(("there", "here", "saver"), MEETINGS)
def test_weights_load_whatever_wraps_the_models(tmp_path, there, here, saver):
    source, target = WRAPPERS[there](plain(0)), WRAPPERS[here](plain(1))
    assert bits(source) != bits(target)
    SAVERS[saver](source, tmp_path / "weights")
    assert load_weights(tmp_path / "weights", target) == ([], [])
    assert bits(target) == bits(source) == bits(plain(0))
    if saver == "by us":
        assert load_file(tmp_path / "weights").keys() == plain().state_dict().keys()


class Own(nn.Module):
    """A model whose own parts have the names that wrappers use."""

    def __init__(self):
        super().__init__()
        self.module = nn.ModuleDict({"x": nn.Linear(2, 2), "module": nn.Linear(2, 2)})
        self.x = nn.Linear(2, 2)


@pytest.mark.parametrize("there", [Own, lambda: Ddp(Own()), lambda: compiled(Own())])
@pytest.mark.parametrize("here", [Own, lambda: Ddp(Own()), lambda: compiled(Own())])
@pytest.mark.parametrize("saver", ["by us", "torch"])
def test_a_models_own_names_are_no_wrappers(tmp_path, there, here, saver):
    source, target = there(), here()
    SAVERS[saver](source, tmp_path / "weights")
    load_weights(tmp_path / "weights", target)
    assert bits(target) == bits(source)
    assert plain_weights(source).keys() == Own().state_dict().keys()


@pytest.mark.parametrize("saver", SAVERS)
def test_tied_tensors_load_from_one_name_and_from_two(tmp_path, saver):
    source, target = Tied(), Tied()
    if saver != "safetensors":
        SAVERS[saver](source, tmp_path / "weights")
    else:
        save_file({"last.weight": source.last.weight.detach()}, tmp_path / "weights")
    load_weights(tmp_path / "weights", target)
    assert bits(target) == bits(source)
    assert target.first.weight is target.last.weight


def test_weights_that_were_not_tied_do_not_fit_a_tied_model(tmp_path):
    source, target = Tied(is_tied=False), Tied()
    before = bits(target)
    save_weights(source, tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"`first.weight` and `last.weight` are one tensor"):
        load_weights(tmp_path / "weights", target)
    assert bits(target) == before
    with torch.no_grad():
        source.last.weight.copy_(source.first.weight)
    save_weights(source, tmp_path / "weights")
    load_weights(tmp_path / "weights", target)
    assert torch.equal(target.last.weight, source.last.weight)


def write_run(directory, seeds):
    """Write a checkpoint at each step of `seeds`; returns the last model."""
    for step, seed in seeds.items():
        model = plain(seed)
        model.register_buffer("passing", torch.full((2,), float(seed)), persistent=False)
        others = nn.Parameter(torch.zeros(1))  # a parameter that only the optimizer has
        optimizer = torch.optim.SGD([*model.parameters(), others], lr=0.1)
        facts = {"position": {"step": step, "epoch": 0, "batch": 0}, "identity": {}}
        RunDirectory(directory).write(step, files_of_run(model, optimizer, facts))
    return model


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("place", [".", "checkpoints/step-000000000009"])
def test_a_checkpoint_gives_parameters_and_all_buffers(tmp_path, wrapper, place):
    source, target = write_run(tmp_path, {3: 1, 9: 2}), plain()
    target.register_buffer("passing", torch.zeros(2), persistent=False)
    wrapped = WRAPPERS[wrapper](target)
    assert load_weights(tmp_path / place, wrapped) == ([], [])
    assert bits(wrapped) == bits(source)
    assert target.passing.tolist() == [2.0, 2.0]


def test_a_damaged_checkpoint_is_passed_over_or_refused(tmp_path):
    write_run(tmp_path, {3: 1, 9: 2})
    newest = tmp_path / "checkpoints" / "step-000000000009"
    data = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    model = plain()
    model.register_buffer("passing", torch.zeros(2), persistent=False)
    with pytest.raises(CheckpointError, match=rf"{newest} must be whole, .*checksum.*pass the run"):
        load_weights(newest, model)
    (newest / "commit.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{newest} must be whole, .*must name .*pass the"):
        load_weights(newest, model)
    assert bits(model) == bits(plain())
    load_weights(tmp_path, model)
    assert bits(model) == bits(plain(1))
    (tmp_path / "checkpoints" / "step-000000000003" / "commit.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint \(step-000000000009: "):
        load_weights(tmp_path, model)


@pytest.mark.parametrize("strict", [True, False])
def test_a_file_beyond_what_the_model_needs_is_refused_unread(tmp_path, strict):
    write_run(tmp_path, {3: 1})
    folder = tmp_path / "checkpoints" / "step-000000000003"
    facts = json.loads((folder / "commit.json").read_text())
    facts["model.safetensors"]["bytes"] = 1 << 42
    (folder / "commit.json").write_text(json.dumps(facts))
    os.truncate(folder / "model.safetensors", 1 << 42)
    (tmp_path / "weights").touch()
    os.truncate(tmp_path / "weights", 1 << 42)
    for path in (tmp_path, folder, tmp_path / "weights"):
        with pytest.raises(CheckpointError, match=r"must have at most .* has 4,398,046,511,104"):
            load_weights(path, plain(), strict=strict)


def saved(path, **changes):
    tensors = plain(1).state_dict() | {name.replace("_", "."): t for name, t in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0_weight": None}, "only the model has `0.weight`, and only the file nothing"),
        ({"new": torch.zeros(1)}, "only the model has nothing, and only the file `new`"),
        (
            {f"n{number}": torch.zeros(1) for number in range(9)},
            "the file `n0`, `n1`, `n2`, `n3` and 5 more: make the model as it was",
        ),
        ({"0_weight": torch.zeros(3, 2)}, r"`0.weight` must be of shape \(3, 2\) .* is of .*2, 3"),
        ({"0_bias": torch.zeros(2, 1)}, r"`0.bias` must be of shape \(2, 1\)"),
        (
            {"0_bias": torch.zeros(2).half()},
            r"`0.bias` must be torch.float16 .*`strict=False`",
        ),
    ],
    ids=range(6),
)
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path, changes, message):
    model = plain()
    saved(tmp_path / "weights", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path / "weights", model)
    assert bits(model) == bits(plain())


def test_a_model_that_does_not_take_its_own_names_stays_as_it_is(tmp_path):
    def renamed(module, state, prefix, metadata):
        state["other name"] = state.pop("0.weight")

    save_weights(plain(1), tmp_path / "file")
    model = plain(2)
    model.register_state_dict_post_hook(renamed)
    weights = dict(load_file(tmp_path / "file"))
    weights["other name"] = weights.pop("0.weight")
    save_file(weights, tmp_path / "file")
    with pytest.raises(CheckpointError, match="takes no `other name`, which a hook may have"):
        load_weights(tmp_path / "file", model)
    assert all(map(torch.equal, model.parameters(), plain(2).parameters()))


def test_what_has_a_name_in_both_is_loaded_when_asked_for(tmp_path):
    model, others = plain(), plain(1)
    saved(
        tmp_path / "weights",
        **{"0_weight": None, "new": torch.zeros(1), "0_bias": torch.ones(2).half()},
    )
    assert load_weights(tmp_path / "weights", model, strict=False) == (["0.weight"], ["new"])
    assert torch.equal(model[0].weight, plain()[0].weight)
    assert model[0].bias.dtype == torch.float32
    assert model[0].bias.tolist() == [1.0, 1.0]
    assert torch.equal(model[2][0].weight, others[2][0].weight)
    before = bits(model)
    for changes in ({"0_weight": torch.zeros(3, 2)}, {"2_0_bias": torch.zeros(3)}):
        saved(tmp_path / "weights", **changes)
        with pytest.raises(CheckpointError, match="must be of shape"):
            load_weights(tmp_path / "weights", model, strict=False)
        assert bits(model) == before


def test_a_file_with_nothing_for_the_model_is_refused_in_any_case(tmp_path):
    save_file({"other": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(CheckpointError, match="nothing has a name in both; pass other weights"):
        load_weights(tmp_path / "weights", plain(), strict=False)


class Evil:
    """Would leave a mark if it were unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_that_needs_code_is_refused_and_none_is_run(tmp_path, is_zip):
    path, model = tmp_path / "weights.pt", plain()
    for said in (
        {"0.weight": Evil(tmp_path / "mark")},
        Evil(tmp_path / "mark"),
        plain(1),
    ):
        torch.save(said, path, _use_new_zipfile_serialization=is_zip)
        with pytest.raises(CheckpointError, match="reading those can run any code"):
            load_weights(path, model)
    assert not (tmp_path / "mark").exists()
    assert bits(model) == bits(plain())


@pytest.mark.filterwarnings("ignore:.*parse .*invariant")  # of case 2, in each torch's words
@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([1, 2], "must hold a state dict, but holds a list"),
        ({"model": {}, "step": 3}, "but has other things, `model`, `step`"),
        ({"0.weight": torch.zeros(2, 3).to_sparse()}, "dense tensors, but has .*`0.weight`"),
        ({"0.weight": torch.zeros(2, 3, device="meta")}, "dense tensors, but has .*`0.weight`"),
        ({}, "only the model has"),
        ({0: torch.zeros(1)}, "only the file `0`"),
    ],
    ids=range(6),
)
def test_what_torch_wrote_must_be_a_state_dict(tmp_path, said, message):
    model = plain()
    torch.save(said, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path / "weights.pth", model)
    assert bits(model) == bits(plain())


def test_paths_that_are_nothing_are_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"but .*/none is not there"):
        load_weights(tmp_path / "none", plain())
    with pytest.raises(FileNotFoundError, match="but /dev/null is none of them"):
        load_weights("/dev/null", plain())
    with pytest.raises(CheckpointError, match="holds no whole checkpoint: pass another path"):
        load_weights(tmp_path, plain())


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(2), lambda: nn.Linear(2, 2, device="meta")])
def test_a_model_without_memory_is_refused(tmp_path, make):
    save_weights(nn.Linear(2, 2), tmp_path / "weights")
    with pytest.raises(ValueError, match="must have memory for its weights, but `weight` has none"):
        load_weights(tmp_path / "weights", make())


class Extra(nn.Linear):
    """Has a word of its own in its state dict."""

    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        raise AssertionError


def test_what_is_no_tensor_in_a_state_dict_has_no_place(tmp_path):
    source, target = Extra(2, 2), Extra(2, 2)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    load_weights(tmp_path / "weights.pt", target)
    assert bits(target) == bits(source)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, files = tmp_path_factory.mktemp("files"), {}
    for saver in SAVERS:
        SAVERS[saver](plain(1), folder / saver)
        files[saver] = (folder / saver).read_bytes()
    return folder, files


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(SAVERS)), st.data())
def test_a_damaged_file_is_refused_or_loads_in_whole(files, saver, data):
    folder, whole = files[0], bytearray(files[1][saver])
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        del whole[place:]
    else:
        whole[place] ^= 1 << data.draw(st.integers(0, 7))
    path = folder / "damaged"
    path.write_bytes(whole)
    model = plain()
    try:
        load_weights(path, model)
    except CheckpointError:
        assert bits(model) == bits(plain())


TENSOR = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"w": 1}',
        b"[" * 10_000,
        {"w": TENSOR | {"data_offsets": [0, 1 << 62]}},
        {"w": TENSOR | {"data_offsets": [24, 0]}},
        {"w": TENSOR | {"data_offsets": [-24, 0]}},
        {"w": TENSOR | {"data_offsets": [8, 32]}},
        {"w": TENSOR | {"shape": [1 << 62, 1 << 62]}},
        {"w": TENSOR | {"shape": [-2, -3]}},
        {"w": TENSOR | {"dtype": "F99"}},
        {"w": TENSOR | {"dtype": "F8_E8M0", "shape": [24]}},
        {"w": TENSOR, "v": TENSOR},
        {"w": TENSOR, "v": TENSOR | {"shape": [0, 1 << 62], "data_offsets": [24, 24]}},
        {"../../w": TENSOR},
        {"__class__": TENSOR},
        {"weight": TENSOR | {"shape": [3, 2]}},
        {"weight": TENSOR | {"dtype": "I32"}},
        {"__metadata__": {"a": 3}, "weight": TENSOR},
    ],
    ids=range(19),
)
def test_hostile_headers_change_nothing(tmp_path, header):
    model = nn.Linear(3, 2, bias=False)
    before = bits(model)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    for length in (len(text), 1 << 62, 0, len(text) + 999):
        (tmp_path / "weights").write_bytes(struct.pack("<Q", length) + text + bytes(24))
        with pytest.raises(CheckpointError):
            load_weights(tmp_path / "weights", model)
        assert bits(model) == before


def test_weights_that_no_file_can_hold_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`weight` is torch\.complex128: convert it"):
        save_weights(nn.Linear(2, 2, dtype=torch.complex128), tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


HOSTILE = "a\x1b]0;title\x07\r\n\u202eb\0"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("saver", [save_file, torch.save])
def test_names_from_a_file_cannot_steer_a_terminal(tmp_path, saver, strict):
    """A terminal obeys control characters; a name that is shown must not have any."""
    path = tmp_path / f"weights {HOSTILE[:-1]}"
    if saver is save_file:
        path.write_bytes(save({HOSTILE: torch.zeros(1)}))
    else:
        torch.save({HOSTILE: torch.zeros(1)}, path)
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, plain(), strict=strict)
    assert str(caught.value).isprintable()
    assert r"`a\x1b]0;title\x07\r\n\u202eb\x00`" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3,), torch.float32), ((2,), torch.float16)], ids=["shape", "dtype"]
)
def test_nor_can_those_of_a_model(tmp_path, shape, dtype):
    model = plain()
    model.register_buffer(HOSTILE, torch.zeros(2))
    saved(tmp_path / "weights", **{HOSTILE: torch.zeros(shape, dtype=dtype)})
    with pytest.raises(CheckpointError, match=r"`a\\x1b") as caught:
        load_weights(tmp_path / "weights", model)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x1b[31m" * 9,
        struct.pack("<Q", 30) + b'{"\x1b[31m\\u001b": {"dtype": "X"}}',
        struct.pack("<Q", 1 << 60) + b"{}",
        b"PK\3\4\x1b[31m",
        b"\x80\x02cos\n\x1b[31m\nq\x01.",
    ],
)
def test_a_damaged_file_says_nothing_raw(tmp_path, data):
    (tmp_path / "weights").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path / "weights", plain())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_a_folder_that_is_not_there_is_told_in_characters_that_can_be_shown(tmp_path):
    stands_in_the_way = tmp_path / os.fsdecode(b"\x1b[31m \xff")
    stands_in_the_way.touch()
    words = r"\\x1b\[31m \\udcff/weights cannot be written \(File exists\): save elsewhere"
    with pytest.raises(FileExistsError, match=words) as caught:
        save_weights(plain(), stands_in_the_way / "weights")
    assert str(caught.value).isprintable()


class FullDisk(io.BytesIO):
    """A file that has room for a page."""

    def write(self, data):
        if self.tell() + len(data) > 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("name", ["best.safetensors", "best.pt"])
def test_a_full_disk_is_said_in_the_same_words_for_each_format(tmp_path, monkeypatch, name):
    monkeypatch.setattr(load, "written_whole", lambda path: FullDisk())
    with pytest.raises(OSError, match=rf"{name} cannot be written \(No space left on device\)"):
        save_weights(nn.Linear(100, 100), tmp_path / name)
