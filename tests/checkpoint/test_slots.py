"""A snapshot in memory becomes files that the safetensors package reads, to the last bit."""

import json
import mmap
import os
import subprocess
import sys
import tempfile
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from unisono.runtime.checkpoint import slots
from unisono.runtime.checkpoint.folder import FILES, write_folder
from unisono.runtime.checkpoint.run_directory import RunDirectory
from unisono.runtime.dtypes import CODES, code_of, dtype_of

FACTS = {"position": {"step": 3}, "loss": float("inf"), "text": "ü"}
DTYPES = {dtype_of(code): code for code in CODES.values()}


def bits(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def random_tensor(dtype, shape):
    flat = torch.randint(0, 2 if dtype == torch.bool else 256, (4096,), dtype=torch.uint8)
    numel = torch.Size(shape).numel()
    return flat[: numel * dtype.itemsize].clone().view(dtype).reshape(shape)


def lying(tensor):
    """The bytes of a dense tensor, in the order in which they lie."""
    order = sorted(range(tensor.dim()), key=lambda place: -tensor.stride(place))
    return bits(tensor.permute(order))


def described(name, tensor, offset, part):
    return {
        "name": name,
        "dtype": code_of(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": offset,
        "in": part,
    }


def make_slot(model, optimizer=None, facts=FACTS, room=0):
    """Lay the model's tensors out in the state and the optimizer's as extras."""
    listed, state = {name: [] for name in slots.TENSOR_FILES}, b""
    for name, tensor in model.items():
        listed["model.safetensors"].append(described(name, tensor, len(state), "state"))
        state += lying(tensor)
        state += bytes(-len(state) % 64)
    extras = [lying(tensor) for tensor in (optimizer or {}).values()]
    for (name, tensor), offset in zip(
        (optimizer or {}).items(), slots.offsets_of([len(data) for data in extras]), strict=True
    ):
        listed["optimizer.safetensors"].append(described(name, tensor, offset, "extra"))
    texts = [json.dumps(said).encode() for said in (facts, listed)]
    size = len(state) + slots.blob_bytes(*map(len, texts), [len(data) for data in extras]) + room
    slot = mmap.mmap(-1, size)
    slot[: len(state)] = state
    slots.write_blob(slot, len(state), *texts, extras)
    return slot, len(state), listed


def read_back(slot, blob_at):
    files = {name: b"".join(chunks) for name, chunks in slots.files_of(slot, blob_at).items()}
    assert set(files) == set(FILES)
    return load(files["model.safetensors"]), load(files["optimizer.safetensors"]), files["run.json"]


def assert_same(read, tensors):
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(read[name]) == bits(tensor), name


def test_every_dtype_that_safetensors_reads_has_its_code():
    from safetensors.torch import _TYPES

    assert {code: dtype for dtype, code in DTYPES.items()} == _TYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_written_is_read(dtype):
    image = random_tensor(dtype, (2, 3, 4, 5))
    model = {
        "scalar": random_tensor(dtype, ()),
        "none": random_tensor(dtype, (0, 3)),
        "row": random_tensor(dtype, (7,)),
        "one": random_tensor(dtype, (1, 1, 3)).as_strided((1, 1, 3), (99, 7, 1)),
        "channels_last": image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "transposed": random_tensor(dtype, (5, 3)).t(),
    }
    assert not model["channels_last"].is_contiguous()
    slot, blob_at, _ = make_slot(model, {f"ü/{name}": t for name, t in model.items()})
    read, optimizer, facts = read_back(slot, blob_at)
    assert_same(read, model)
    assert_same(optimizer, {f"ü/{name}": tensor for name, tensor in model.items()})
    assert facts == json.dumps(FACTS, indent=1).encode()


LAYOUTS = st.tuples(
    st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=4), st.randoms()
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=9), LAYOUTS, max_size=5),
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=9), LAYOUTS, max_size=5),
)
def test_every_dense_layout_is_read(model, optimizer):
    def made(layouts):
        tensors = {}
        for name, (dtype, shape, random) in layouts.items():
            order = random.sample(range(len(shape)), len(shape))
            tensors[name] = random_tensor(dtype, shape).permute(order)
        return tensors

    model, optimizer = made(model), made(optimizer)
    slot, blob_at, listed = make_slot(model, optimizer, room=128)
    read = read_back(slot, blob_at)
    assert_same(read[0], model)
    assert_same(read[1], optimizer)
    assert slots.read_facts(slot, blob_at) == FACTS
    expected = zip(listed["optimizer.safetensors"], map(lying, optimizer.values()), strict=True)
    assert slots.read_extras(slot, blob_at) == list(expected)


def test_every_tensor_of_a_file_is_aligned_and_contiguous_ones_are_not_copied():
    model = {f"{n:03}": random_tensor(dtype, (n % 5 + 1,)) for n, dtype in enumerate(DTYPES)}
    slot, blob_at, _ = make_slot(model)
    header, *data = slots.files_of(slot, blob_at)["model.safetensors"]
    assert all(chunk.obj is slot for chunk in data)
    places = json.loads(header[8:])
    assert len(header) % 8 == 0
    for name, tensor in model.items():
        assert places[name]["data_offsets"][0] % tensor.dtype.itemsize == 0


def test_the_order_in_which_tensors_lie_does_not_count():
    model = {"a": torch.arange(3.0), "b": torch.arange(4), "c": torch.zeros(2)}
    one, other = make_slot(model), make_slot(dict(reversed(model.items())))
    files = [slots.files_of(slot, blob_at) for slot, blob_at, _ in (one, other)]
    assert b"".join(files[0]["model.safetensors"]) == b"".join(files[1]["model.safetensors"])


def test_a_slot_is_written_to_a_folder_and_let_go(tmp_path):
    model = {"w": torch.arange(6.0).reshape(2, 3).t()}
    slot, blob_at, _ = make_slot(model)
    write_folder(tmp_path / "step", slots.files_of(slot, blob_at))
    store = RunDirectory(tmp_path)
    store.write(7, slots.files_of(slot, blob_at))
    assert store.has(7)
    slot.close()  # would raise if a view of it were left
    assert_same(load((tmp_path / "step" / "model.safetensors").read_bytes()), model)
    assert store.newest(dict)[1].step == 7


@pytest.mark.parametrize(
    "dtype", [torch.complex128, torch.complex32, torch.float8_e8m0fnu], ids=str
)
def test_what_no_file_can_hold_lies_in_memory_alone(dtype):
    own = random_tensor(dtype, (5,))
    slot, blob_at, listed = make_slot({}, {"none": random_tensor(dtype, (0,)), "own": own})
    expected = zip(listed["optimizer.safetensors"], [b"", bits(own)], strict=True)
    assert slots.read_extras(slot, blob_at) == list(expected)
    with pytest.raises(ValueError, match=f"safetensors supports, but `none` is {dtype}"):
        slots.files_of(slot, blob_at)


def test_a_slot_can_be_written_again():
    slot, blob_at, _ = make_slot({"w": torch.zeros(3)}, {"m": torch.zeros(99)})
    listed = json.dumps({name: [] for name in slots.TENSOR_FILES}).encode()
    slots.write_blob(slot, blob_at, b"{}", listed)
    assert read_back(slot, blob_at) == ({}, {}, b"{}")


@pytest.mark.parametrize("missing", [1, 64, 200])
def test_what_does_not_fit_is_refused_and_nothing_is_written(missing):
    slot, blob_at, listed = make_slot({"w": torch.zeros(3)}, {"m": torch.zeros(9)})
    size, texts = len(slot), [json.dumps(said).encode() for said in (FACTS, listed)]
    small = bytearray(b"\7") * (size - missing)
    with pytest.raises(ValueError, match=f"must have {size:,} bytes .* but has {len(small):,}"):
        slots.write_blob(memoryview(small), blob_at, *texts, [bytes(36)])
    assert set(small) == {7}


def test_a_blob_that_was_not_finished_is_none():
    slot, blob_at, listed = make_slot({"w": torch.zeros(3)})
    texts = [json.dumps(said).encode() for said in (FACTS, listed)]
    with suppress(TypeError):
        slots.write_blob(slot, blob_at, texts[0], "no bytes")
    with pytest.raises(ValueError, match="must hold a whole snapshot"):
        slots.files_of(slot, blob_at)


W = {"name": "w", "dtype": "F32", "shape": [3], "stride": [1], "offset": 0, "in": "state"}


def test_a_name_of_the_format_and_dtypes_that_nobody_knows_are_refused():
    for change in ({"name": "__metadata__"}, {"name": "other"}, {"dtype": "torch.bits8"}):
        other = W | {"name": "other", "shape": [0], "stride": [1]}
        listed = {"model.safetensors": [W | change, other], "optimizer.safetensors": []}
        slot = memoryview(bytearray(8192))
        slots.write_blob(slot, 64, b"{}", json.dumps(listed).encode())
        with pytest.raises(ValueError, match="must"):
            slots.files_of(slot, 64)


@pytest.mark.slow
def test_neither_torch_nor_numpy_is_loaded_for_contiguous_tensors(tmp_path):
    slot, blob_at, _ = make_slot({"w": torch.zeros(3)})
    with tempfile.NamedTemporaryFile(dir=tmp_path) as file:
        file.write(slot)
        file.flush()
        code = (
            "import mmap, sys\n"
            "from pathlib import Path\n"
            "from unisono.runtime.checkpoint import run_directory, slots\n"
            f"with open({file.name!r}, 'r+b') as file:\n"
            "    slot = mmap.mmap(file.fileno(), 0)\n"
            f"files = slots.files_of(slot, {blob_at})\n"
            f"run_directory.RunDirectory(Path({os.fspath(tmp_path)!r})).write(1, files)\n"
            "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
    assert RunDirectory(tmp_path).newest(dict)[1].step == 1
