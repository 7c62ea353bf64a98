"""Where do predictions lie while all workers write them? In one file, mapped by everybody.

::

    | length of the header u64 | header: JSON | rows of the first tensor | of the second | …

It is a safetensors file, so it can be read in parts and by others, and holds nothing but numbers.
With a path it is made beside it under another name and renamed when every row is there; without
one it is a memfd of the lead, which the others open through its process. Each row is written
once, at its sample's number, by whoever computed it. What is given out in the end is a private
mapping: whoever changes it changes no one else's, and rows are read when they are looked at.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.tensors import CODES
from unisono.comm.memory import Memory

_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 64
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a model's output: its place in the output, its dtype, the shape of one row."""

    name: str
    dtype: torch.dtype
    row: tuple[int, ...]

    def as_json(self) -> list[Any]:
        """Write it as JSON."""
        return [self.name, str(self.dtype), list(self.row)]

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> Field:
        """Read what :meth:`as_json` wrote."""
        name, dtype, row = said
        return cls(name, getattr(torch, dtype.removeprefix("torch.")), tuple(row))


def form_of(output: Any) -> str:
    """Name what holds the tensors of a model's output, for :func:`put_together`."""
    if isinstance(output, Mapping):
        return "dict"
    return "tuple" if isinstance(output, (tuple, list)) else "tensor"


def put_together(form: str, rows: Rows) -> Any:
    """Give predictions the form of the model's output: a tensor, a tuple or a dict."""
    if form == "dict":
        return {field.name: tensor for field, tensor in rows.tensors.items()}
    tensors = tuple(rows.tensors.values())
    return tensors if form == "tuple" else tensors[0]


def fields_of(output: Any, num_samples: int) -> dict[Field, torch.Tensor]:
    """Take a model's output apart.

    Args:
        output: a tensor, or a tuple, list or dict of tensors, one row a sample in each.
        num_samples: how many samples the model was given.

    Raises:
        TypeError: it is nothing of that kind.
        ValueError: a tensor has another number of rows.
    """
    form = form_of(output)
    if form == "dict":
        tensors = {str(name): tensor for name, tensor in output.items()}
    elif form == "tuple":
        tensors = {str(number): tensor for number, tensor in enumerate(output)}
    else:
        tensors = {"predictions": output}
    return {_field(name, tensor, num_samples): tensor for name, tensor in tensors.items()}


def _field(name: str, tensor: Any, num_samples: int) -> Field:
    if not isinstance(tensor, torch.Tensor) or str(tensor.dtype) not in CODES:
        kind = str(tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(
            f"predictions must be a tensor, or a tuple or dict of tensors, of dtypes that a "
            f"safetensors file can hold, but {name!r} is of type {kind}: return such tensors from "
            f"`forward`."
        )
    if tensor.dim() == 0 or tensor.shape[0] != num_samples:
        raise ValueError(
            f"predictions must have one row for each sample, but for {num_samples} samples "
            f"{name!r} has the shape {tuple(tensor.shape)}: let `forward` keep the first dimension."
        )
    return Field(name, tensor.dtype, tuple(tensor.shape[1:]))


class Rows:
    """Memory for the predictions of a whole dataset, mapped in this process. Final.

    Args:
        fd: of the file, which is closed here.
        fields: the tensors.
        num_samples: the rows of each.
        is_private: whether what is written stays in this process.
    """

    def __init__(
        self, fd: int, fields: Sequence[Field], num_samples: int, *, is_private: bool
    ) -> None:
        header = _header(fields, num_samples)
        num_bytes = len(header) + sum(_num_bytes(field, num_samples) for field in fields)
        try:
            if os.fstat(fd).st_size != num_bytes:
                raise OSError(f"the file of predictions must have {num_bytes:,} bytes")
            flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
            mapping = mmap.mmap(fd, num_bytes, flags=flags)
        finally:
            os.close(fd)
        memory = Memory(mapping)
        starts = _starts(fields, num_samples)
        self.tensors = {
            field: memory.tensor(
                len(header) + starts[field], (num_samples, *field.row), field.dtype, None
            )
            for field in fields
        }

    def write(self, indices: torch.Tensor, output: Mapping[Field, torch.Tensor]) -> None:
        """Put the rows of some samples in their place.

        Raises:
            ValueError: they differ from what the first batch had.
        """
        if list(output) != list(self.tensors):
            raise ValueError(
                f"predictions must have the same names, dtypes and shapes for every batch, but "
                f"were {_in_words(self.tensors)} for the first and are {_in_words(output)} here: "
                f"pad rows to one length, say."
            )
        for field, tensor in output.items():
            self.tensors[field][indices] = tensor.detach()


def make_memory(fields: Sequence[Field], num_samples: int) -> int:
    """Make a file without a name for predictions; return its descriptor."""
    fd = os.memfd_create("unisono-predictions", os.MFD_CLOEXEC)
    _fill(fd, fields, num_samples)
    return fd


def make_file(path: Path, fields: Sequence[Field], num_samples: int) -> int:
    """Make the file beside `path` in which predictions are collected; return its descriptor.

    Raises:
        OSError: the folder does not exist, cannot be written, or has not that much room.
    """
    partial = partial_path(path)
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        _fill(fd, fields, num_samples)
        # Now, where an error can be told: a mapped file on a full disk ends the process.
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    except BaseException:
        os.close(fd)
        partial.unlink()
        raise
    return fd


def partial_path(path: Path) -> Path:
    """Name the file that is not whole yet."""
    return path.with_name(path.name + _PARTIAL)


def finish_file(path: Path) -> None:
    """Give the file its name, once every row is on the disk; nothing if that has been done."""
    partial = partial_path(path)
    if path.exists() and not partial.exists():
        return  # by a lead that was lost right afterwards
    fd = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(partial, path)


def _fill(fd: int, fields: Sequence[Field], num_samples: int) -> None:
    header = _header(fields, num_samples)
    os.write(fd, header)
    os.ftruncate(fd, len(header) + sum(_num_bytes(field, num_samples) for field in fields))


def _header(fields: Sequence[Field], num_samples: int) -> bytes:
    entries = {
        field.name: {
            "dtype": CODES[str(field.dtype)],
            "shape": [num_samples, *field.row],
            "data_offsets": [start, start + _num_bytes(field, num_samples)],
        }
        for field, start in _starts(fields, num_samples).items()
    }
    text = json.dumps(entries).encode()
    length = -(-(_LENGTH.size + len(text)) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES - _LENGTH.size
    return _LENGTH.pack(length) + text.ljust(length)


def _starts(fields: Sequence[Field], num_samples: int) -> dict[Field, int]:
    """Say where each tensor begins, behind the header: wide elements first, so all are aligned."""
    starts, start = {}, 0
    for field in sorted(fields, key=lambda field: -field.dtype.itemsize):
        starts[field] = start
        start += _num_bytes(field, num_samples)
    return starts


def _num_bytes(field: Field, num_samples: int) -> int:
    numel = num_samples
    for size in field.row:
        numel *= size
    return numel * field.dtype.itemsize


def _in_words(fields: Mapping[Field, torch.Tensor]) -> str:
    return ", ".join(
        f"{field.name} of {str(field.dtype).removeprefix('torch.')} {list(field.row)}"
        for field in fields
    )
