"""Where do predictions lie while all workers write them? In one file, mapped by everybody.

::

    | length of the header u64 | header: JSON | rows of the first tensor | of the second | …

It is a safetensors file, so it can be read in parts and by others, and holds nothing but numbers
(see ``rowsfile`` for where it is). Each row is written once, at its sample's number, by whoever
computed it. What is given out in the end is a private mapping: whoever changes it changes no one
else's, and rows are read when they are looked at.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.checkpoint.safetensors_stream import CODES
from unisono.workers.memory import Memory

_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 64
_RESERVED = "__metadata__"  # of a safetensors file


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
        ValueError: a tensor has another number of rows, or a name that no file can hold.
    """
    form = form_of(output)
    if form == "dict":
        for name in output:
            _check_name(name)
        tensors = dict(output)
    elif form == "tuple":
        tensors = {str(number): tensor for number, tensor in enumerate(output)}
    else:
        tensors = {"predictions": output}
    return {_field(name, tensor, num_samples): tensor for name, tensor in tensors.items()}


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"predictions in a dict must have strings as names, but one is {name!r}, of type "
            f"{type(name).__name__}: name it {str(name)!r}, say."
        )
    if name == _RESERVED:
        raise ValueError(
            f"predictions must have names that a safetensors file can hold, but {_RESERVED!r} "
            f"means something else there: name them otherwise."
        )


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
        num_bytes = size_of(fields, num_samples)
        start_of_rows = len(header_of(fields, num_samples))
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
                start_of_rows + starts[field], (num_samples, *field.row), field.dtype, None
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


def size_of(fields: Sequence[Field], num_samples: int) -> int:
    """Count the bytes of the file."""
    num_bytes = sum(_num_bytes(field, num_samples) for field in fields)
    return len(header_of(fields, num_samples)) + num_bytes


def header_of(fields: Sequence[Field], num_samples: int) -> bytes:
    """Write what comes before the rows: which tensor begins where."""
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
