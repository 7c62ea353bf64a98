"""The safetensors format, written as a stream, straight from memory and without torch.

::

    | length of the header u64 | header: JSON, padded with spaces | data of each tensor, by rows |

The safetensors package builds the whole file in memory first; this does not, and frees the
interpreter between two tensors. Whatever dtype that package reads is written here. Source of the
format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unisono.dtypes import ITEM_BYTES

Data = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor within its part of the slot; `data` begins with it and goes on to the part's end."""

    name: str
    code: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: memoryview
    num_bytes: int


def safetensors_of(tensors: Sequence[Tensor]) -> Iterator[Data]:
    """Write a safetensors file: length of the header (u64), header (JSON), data."""
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
    """View a tensor's bytes in row-major order; copied only where they do not lie so."""
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and step != expected:
            return _copied_in_rows(tensor)
        expected *= size
    return tensor.data[: tensor.num_bytes]


def _copied_in_rows(tensor: Tensor) -> memoryview:
    import numpy as np

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
