"""A snapshot in shared memory, and the checkpoint files that are written straight from it.

A worker writes the snapshot between two steps; the launcher, which never loads torch, writes files
from it while training continues. One slot of memory, with parts at multiples of 64 bytes::

    0                       blob_at                                                  the slot's end
    | state: raw tensors ... | header | JSON: facts and tensors | extra 0 | extra 1 ... |

The JSON is ``{"facts": {...}, "tensors": {"model.safetensors": [T, ...], "optimizer.safetensors":
[T, ...]}}`` and describes the place of each tensor T, in elements (`stride`) and bytes (`offset`,
from the start of the part that `in` names)::

    {"name": "0.weight", "dtype": "F32", "shape": [2, 3], "stride": [3, 1],
     "offset": 64, "in": "state"}

A blob's header is written last, so that an unfinished blob is invalid. A run has two slots, written
alternately, and marks that describe them::

    marks   │ sequence u64 of slot 0 │ of slot 1 │ busy u8 │ busy u8 │
    slot    │ a copy of the state    │ blob: what it means           │      twice

A slot whose mark is 0 is incomplete; the slot with the larger mark is the newest. A mark is cleared
before its slot is written and set once all workers have written their share, so one complete
snapshot always exists, even if a worker dies meanwhile. Busy slots are being written to the disk.

The safetensors package first builds the whole file in memory; this module streams it, which
releases the interpreter between two tensors. Source: https://github.com/huggingface/safetensors::

    | length of the header u64 | header: JSON, padded with spaces | data of each tensor, by rows |
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, final

from unisono.runtime.checkpoint.folder import MODEL_FILE, OPTIMIZER_FILE, RUN_FILE
from unisono.runtime.dtypes import ITEM_BYTES, ITEM_BYTES_IN_MEMORY

ALIGNMENT_BYTES = 64
TENSOR_FILES = (MODEL_FILE, OPTIMIZER_FILE)

_HEADER = struct.Struct("<8sQQ")  # magic, bytes of the JSON, bytes of the extras
_MAGIC = b"unisono1"
_FACTS, _TENSORS, _END = b'{"facts":', b',"tensors":', b"}"


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of extras within the extra part, in the order of :func:`write_blob`."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += _aligned(size)
    return offsets


def blob_bytes(facts: int, tensors: int, extra: Sequence[int] = ()) -> int:
    """Return the size of a blob; a slot needs `blob_at` more bytes."""
    json_bytes = len(_FACTS) + facts + len(_TENSORS) + tensors + len(_END)
    return _extra_at(0, json_bytes) + sum(map(_aligned, extra))


def write_blob(
    slot: memoryview | mmap.mmap,
    blob_at: int,
    facts: bytes,
    tensors: bytes,
    extra: Sequence[Data] = (),
) -> None:
    """Write the description of the state in a slot, starting at `blob_at`, a multiple of 64.

    `facts` go into run.json. `tensors` lists the tensors of each of :data:`TENSOR_FILES`. `extra`
    has the bytes of tensors that are not in the state.
    """
    with memoryview(slot) as view:
        assert blob_at % ALIGNMENT_BYTES == 0
        needed = blob_bytes(len(facts), len(tensors), [memoryview(data).nbytes for data in extra])
        if blob_at + needed > len(view):
            raise ValueError(
                f"the slot must have {blob_at + needed:,} bytes for this snapshot, but has "
                f"{len(view):,}: ask for a larger one."
            )
        view[blob_at : blob_at + _HEADER.size] = bytes(_HEADER.size)
        end = blob_at + _HEADER.size
        for part in (_FACTS, facts, _TENSORS, tensors, _END):
            end = _put(view, end, part)
        json_bytes = end - blob_at - _HEADER.size
        end = _extra_at(blob_at, json_bytes)
        for data in extra:
            end = blob_at + _aligned(_put(view, end, data) - blob_at)
        extra_bytes = end - _extra_at(blob_at, json_bytes)
        _put(view, blob_at, _HEADER.pack(_MAGIC, json_bytes, extra_bytes))


def used_bytes(slot: memoryview | mmap.mmap, blob_at: int) -> int:
    """Return the size of a snapshot, from the slot's start to the end of its blob."""
    return _Blob(slot, blob_at).end


def read_facts(slot: memoryview | mmap.mmap, blob_at: int) -> dict[str, Any]:
    """Return the facts of a snapshot."""
    return _Blob(slot, blob_at).facts


def read_extras(
    slot: memoryview | mmap.mmap, blob_at: int
) -> list[tuple[dict[str, Any], memoryview]]:
    """Return the tensors that are not in the state: each T, and its stored bytes.

    The slot cannot be closed while any of these views exists.
    """
    blob = _Blob(slot, blob_at)
    found = ((said, blob.tensor(said)) for said in blob.listed(OPTIMIZER_FILE))
    return [(said, one.data[: one.num_bytes]) for said, one in found if said["in"] == "extra"]


def files_of(slot: memoryview | mmap.mmap, blob_at: int) -> dict[str, Iterable[Data]]:
    """Return the three files of a checkpoint, each as chunks to be written in order.

    Contiguous tensors are views of the slot. Raises a ValueError for a tensor that no file holds.
    """
    blob = _Blob(slot, blob_at)
    files: dict[str, Iterable[Data]] = {
        name: safetensors_of(_ordered(name, [blob.tensor(said) for said in blob.listed(name)]))
        for name in TENSOR_FILES
    }
    files[RUN_FILE] = (json.dumps(blob.facts, indent=1).encode(),)
    return files


@final
class _Blob:
    def __init__(self, slot: memoryview | mmap.mmap, blob_at: int) -> None:
        view = memoryview(slot)
        magic, json_bytes, extra_bytes = b"", 0, 0
        if blob_at + _HEADER.size <= len(view):
            magic, json_bytes, extra_bytes = _HEADER.unpack_from(view, blob_at)
        extra_at = _extra_at(blob_at, json_bytes)
        if magic != _MAGIC or extra_at + extra_bytes > len(view):
            raise ValueError(f"the slot must hold a whole snapshot at {blob_at}, but does not.")
        self.end, json_at = extra_at + extra_bytes, blob_at + _HEADER.size
        self._json = view[json_at : json_at + json_bytes]
        self._parts = {"state": view[:blob_at], "extra": view[extra_at : self.end]}

    @property
    def facts(self) -> dict[str, Any]:
        """The contents of run.json."""
        facts: dict[str, Any] = self._said["facts"]
        return facts

    def listed(self, file: str) -> list[dict[str, Any]]:
        """Return the descriptions of one file's tensors."""
        tensors: list[dict[str, Any]] = self._said["tensors"][file]
        return tensors

    @cached_property
    def _said(self) -> Any:
        return json.loads(bytes(self._json))

    def tensor(self, said: dict[str, Any]) -> Tensor:
        """Return one tensor."""
        code, shape, stride = said["dtype"], tuple(said["shape"]), tuple(said["stride"])
        if code not in ITEM_BYTES_IN_MEMORY:
            raise ValueError(f"`{said['name']}` must be of a known dtype, but is {code}.")
        num_bytes = math.prod(shape) * ITEM_BYTES_IN_MEMORY[code]
        data = self._parts[said["in"]][said["offset"] :]
        assert num_bytes <= len(data), f"{said['name']} must lie within its part"
        return Tensor(said["name"], code, shape, stride, data, num_bytes)


def _ordered(file: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Check that a file can hold these tensors; sort wide dtypes first, so that all are aligned."""
    others = [tensor for tensor in tensors if tensor.code not in ITEM_BYTES]
    if others:
        raise ValueError(
            f"tensors in a file must have dtypes that safetensors supports, but "
            f"`{others[0].name}` is {others[0].code}: convert it."
        )
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors) or "__metadata__" in names:
        raise ValueError(f"each tensor of {file} must have a unique name, but one has not.")
    return sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.code], tensor.name))


def _put(view: memoryview, start: int, data: Data) -> int:
    raw = memoryview(data)
    if raw.nbytes:
        view[start : start + raw.nbytes] = raw.cast("B")
    return start + raw.nbytes


def _extra_at(blob_at: int, json_bytes: int) -> int:
    return blob_at + _aligned(_HEADER.size + json_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


_MARKS = struct.Struct("<QQBB")
MARKS_BYTES = _MARKS.size


@dataclass(frozen=True, slots=True)
class Places:
    """Positions in a memory, in bytes."""

    key: int  # the key of the memory
    num_bytes: int  # its size
    marks_at: int  # where the marks begin
    slots_at: tuple[int, int]  # where the two slots begin
    slot_bytes: int  # the size of each
    blob_at: int  # where the blob begins within a slot

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Places:
        """Restore an instance from a dict of its fields; ignore other names."""
        named = {name.name: value[name.name] for name in fields(cls)}
        return cls(**{**named, "slots_at": tuple(named["slots_at"])})

    def bounds(self, slot: int) -> slice:
        """Return the range of a slot."""
        return slice(self.slots_at[slot], self.slots_at[slot] + self.slot_bytes)

    def mark_at(self, slot: int) -> int:
        """Return the position of a slot's mark."""
        return self.marks_at + 8 * slot

    def busy_at(self, slot: int) -> int:
        """Return the position of a slot's busy flag."""
        return self.marks_at + 16 + slot

    def marks(self, read: Callable[[int, int], bytes]) -> tuple[int, int]:
        """Return the marks; `read` returns bytes for (offset, count)."""
        first, second, _, _ = _MARKS.unpack(read(self.marks_at, MARKS_BYTES))
        return first, second

    def is_busy(self, slot: int, read: Callable[[int, int], bytes]) -> bool:
        """Return whether a slot is being written to the disk."""
        return read(self.busy_at(slot), 1) != b"\0"

    def newest(self, read: Callable[[int, int], bytes]) -> int | None:
        """Return the slot of the newest complete snapshot; None while there is none."""
        first, second = self.marks(read)
        if not first and not second:
            return None
        return 0 if first > second else 1


Data = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor within its part of the slot; `data` starts at the tensor and ends with the part."""

    name: str
    code: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: memoryview
    num_bytes: int


def safetensors_of(tensors: Sequence[Tensor]) -> Iterator[Data]:
    """Yield a safetensors file: length of the header (u64), header (JSON), data."""
    header, end = {}, 0
    for tensor in tensors:
        place = [end, end + tensor.num_bytes]
        header[tensor.name] = {"dtype": tensor.code, "shape": tensor.shape, "data_offsets": place}
        end += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors:
        if tensor.num_bytes:
            yield _in_rows(tensor)


def _in_rows(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order; a view unless they must be copied."""
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and step != expected:
            break
        expected *= size
    else:
        return tensor.data[: tensor.num_bytes]
    import numpy as np  # which the launcher loads only here

    item_bytes = ITEM_BYTES[tensor.code]
    lying = np.ndarray(
        tensor.shape,
        dtype=f"u{item_bytes}",
        buffer=tensor.data,
        strides=[
            step * item_bytes if size > 1 else item_bytes
            for size, step in zip(tensor.shape, tensor.stride, strict=True)
        ],
    )
    return np.ascontiguousarray(lying).reshape(-1).view(np.uint8).data
