"""Describes a rank's call in words that are the same on every rank that makes the same call.

The words omit what may differ between ranks (the length of an uneven part). A mistake of this rank
alone (two dtypes in one call) is rejected here, before anything is posted. Tensors of any shape and
stride are handled as contiguous vectors from here on, and results are copied back.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from typing import Any, final

import torch

from unisono.runtime.c10d.group_memory import POST_TEXT_BYTES
from unisono.runtime.dtypes import CODES, dtype_name, dtype_of

DTYPES = (*map(dtype_of, CODES), torch.complex32, torch.complex128)
"""The dtypes that can be moved; a dtype's index is the same on all ranks."""

_Vectors = Sequence[torch.Tensor]


def dtype_code(dtype: torch.dtype) -> int:
    """Return the number of a dtype, the same on all ranks."""
    if dtype not in DTYPES:
        raise TypeError(f"tensors must be of a plain dtype, but one is {dtype}: convert it first.")
    return DTYPES.index(dtype)


@functools.lru_cache(maxsize=1024)
def encode(
    kind: str,
    dtype: torch.dtype | None = None,
    numel: int | None = None,
    reduction: str = "",
    root: int | None = None,
    sizes: tuple[int, ...] = (),
    shape: tuple[int, ...] = (),
) -> bytes:
    """Return the description of a call: ``all_reduce(SUM) of 1,024 float32 elements``.

    `numel` and `shape` (of more than a vector) are passed if they must be the same on every rank,
    otherwise `sizes`, the lengths for each rank. `root` is the global rank of the root.
    """
    words = f"{kind}({reduction})" if reduction else kind
    if dtype is not None:
        dtype_code(dtype)
        words += f" of {'' if numel is None else f'{numel:,} '}{dtype_name(dtype)} elements"
    if len(shape) > 1:
        words += f" in the shape {tuple(shape)}"
    if sizes:
        code = zlib.crc32(struct.pack(f"<{len(sizes)}q", *sizes))
        words += f" in parts of {len(sizes)} different sizes (fingerprint {code:08x})"
    if root is not None:
        words += f" with root {root}"
    text = words.encode()
    if len(text) > POST_TEXT_BYTES:
        end = f" … (fingerprint {zlib.crc32(text):08x})".encode()
        text = text[: POST_TEXT_BYTES - len(end)] + end
    return text


@functools.lru_cache(maxsize=1024)
def kind_of(call: bytes) -> str:
    """Return the kind of a call from its description by :func:`encode`."""
    return call.decode().partition("(")[0].partition(" of ")[0]


def call_of_each(
    kind: str,
    vector: torch.Tensor,
    of_each: _Vectors,
    rank: int,
    num_ranks: int,
    reduction: str = "",
) -> bytes:
    """Describe an all_gather or a reduce_scatter: a vector, and one of or for each rank."""
    _check_one_each(of_each, num_ranks)
    _check_same_dtype(vector, *of_each)
    _check_size(vector, of_each[rank])
    sizes = tuple(one.numel() for one in of_each)
    if len(set(sizes)) > 1:
        return encode(kind, vector.dtype, None, reduction, sizes=sizes)
    return encode(kind, vector.dtype, sizes[0], reduction)


def all_to_all_call(outputs: _Vectors, inputs: _Vectors, num_ranks: int) -> bytes:
    """Describe an all_to_all; its sizes differ between ranks and are exchanged later."""
    _check_one_each(inputs, num_ranks)
    _check_one_each(outputs, num_ranks)
    _check_same_dtype(*inputs, *outputs)
    return encode("all_to_all", inputs[0].dtype)


def rooted_call(
    kind: str, vector: torch.Tensor, at_root: _Vectors, root: int, rank: int, names: Sequence[int]
) -> bytes:
    """Describe a gather or a scatter: a vector on every rank, a list of vectors at the root."""
    check_rank("root", root, len(names))
    _check_one_each(at_root, len(names) if rank == root else 0)
    _check_same_dtype(vector, *at_root)
    for one in at_root:
        _check_size(vector, one)
    return encode(kind, vector.dtype, vector.numel(), root=names[root])


def check_rank(role: str, rank: int, num_ranks: int) -> None:
    """Raise if the group has no such rank."""
    if not 0 <= rank < num_ranks:
        raise ValueError(
            f"the {role} of a call must be one of the group's ranks, 0 to {num_ranks - 1}, but is "
            f"{rank}."
        )


def _check_same_dtype(*tensors: torch.Tensor) -> None:
    first = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != first:
            raise TypeError(
                f"the tensors of one call must have one dtype, but are {first} and {tensor.dtype}."
            )


def _check_size(vector: torch.Tensor, other: torch.Tensor) -> None:
    if vector.numel() != other.numel():
        raise ValueError(
            f"what one rank gives and what is made of it must have the same number of elements, "
            f"but have {vector.numel():,} and {other.numel():,}."
        )


def _check_one_each(tensors: _Vectors, num_ranks: int) -> None:
    if len(tensors) != num_ranks:
        raise ValueError(
            f"the list must have {num_ranks} tensors here, one for each rank (none where a "
            f"single rank gives or takes and this is another), but has {len(tensors)}."
        )


def check_movable(tensor: torch.Tensor) -> None:
    """Raise if a tensor is sparse or not on the CPU."""
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"the backend `unisono` moves dense tensors, but got one with layout {tensor.layout}: "
            f"call `to_dense()` first, or for gradients of a DistributedDataParallel take that of "
            f"unisono, which averages sparse ones too."
        )
    if not tensor.is_cpu:
        raise TypeError(
            f"the backend `unisono` moves CPU tensors, but got one on {tensor.device}: use nccl "
            f"or gloo for it."
        )


def listed(tensors: Any) -> list[torch.Tensor]:
    """Return a list of tensors; a single tensor becomes a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def nested(lists: Any) -> list[list[torch.Tensor]]:
    """Return a list of lists; a single list becomes a list of one list."""
    return [lists] if isinstance(lists[0], torch.Tensor) else lists


@final
class Vectors:
    """The vectors of one call, its result, and the tensors whose vectors are copies.

    A vector is a view of a tensor's memory, even if the program replaces the tensor's ``.data``
    later. A non-contiguous tensor is copied when the call runs: the call before may write to the
    same tensor.
    """

    __slots__ = ("_filled", "_given", "result")

    def __init__(self, result: list[Any]) -> None:
        self.result = result
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the vector of a tensor that the call reads."""
        return self._vector_of(tensor, self._given)

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the vector of a tensor that the call writes to, and may read."""
        return self._vector_of(tensor, self._filled)

    def read(self) -> None:
        """Copy the current values of non-contiguous tensors, when the call runs."""
        for vector, tensor in (*self._given, *self._filled):
            vector.copy_(tensor.reshape(-1))

    def write_back(self) -> None:
        """Copy the results in copies back to their tensors."""
        for vector, tensor in self._filled:
            tensor.copy_(vector.view(tensor.shape))

    def _vector_of(
        self, tensor: torch.Tensor, copies: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        tensor = _plain(tensor)
        if tensor.is_contiguous():
            return tensor.view(-1)
        vector = torch.empty(tensor.numel(), dtype=tensor.dtype)
        copies.append((vector, tensor))
        return vector


def as_vector(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's elements in order, or a copy if it is not contiguous."""
    return _plain(tensor).contiguous().view(-1)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    check_movable(tensor)
    if type(tensor) is not torch.Tensor and hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()  # the wrapper around a functional collective's result
    return tensor.detach() if tensor.requires_grad else tensor


def rows(vector: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
    """Split a vector into equal parts."""
    if vector.numel() % num_rows:
        raise ValueError(
            f"the tensor for all ranks must have a multiple of {num_rows} elements, but has "
            f"{vector.numel():,}: one part for each rank."
        )
    return list(vector.view(num_rows, -1).unbind()) if vector.numel() else [vector] * num_rows


def parts(tensor: torch.Tensor, sizes: list[int] | None, num_ranks: int) -> list[torch.Tensor]:
    """Split a contiguous tensor along its first dimension, evenly if `sizes` is empty."""
    if not sizes:
        return rows(tensor.view(-1), num_ranks)
    if len(sizes) != num_ranks or sum(sizes) != tensor.shape[0]:
        raise ValueError(
            f"split sizes must be {num_ranks} numbers with the sum {tensor.shape[0]}, the first "
            f"dimension, but are {list(sizes)}."
        )
    return [part.view(-1) for part in torch.split(tensor, sizes)]
