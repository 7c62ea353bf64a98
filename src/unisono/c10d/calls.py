"""What does a rank want of the others? A call in 32 bytes, and in words.

Each rank posts its call before it comes to the first meeting of it; whoever has met compares all
posts as bytes, and only a difference is ever decoded again. What may differ between ranks (the
length of an uneven part, a tensor's address) is not in these bytes. What is wrong on this rank
alone (a list that is too short, two dtypes in one call) is refused here before anything is posted.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from collections.abc import Sequence

import torch

from unisono.c10d.reduction import OPERATIONS

_FORM = struct.Struct("<BBbxiqqQ")
CALL_BYTES = _FORM.size
NO_ROOT = -1
NO_REDUCTION = -1

KINDS = (
    "nothing",  # all bytes zero: no post yet
    "a call with wrong arguments",
    "init_process_group",
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
_WITH_SHAPES = ("all_reduce", "reduce", "broadcast")
_REDUCTIONS = tuple(OPERATIONS)
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)


def dtype_code(dtype: torch.dtype) -> int:
    """Number a dtype as all ranks do.

    Raises:
        TypeError: tensors of this dtype cannot be moved.
    """
    if dtype not in DTYPES:
        raise TypeError(f"tensors must be of a plain dtype, but one is {dtype}: convert it first.")
    return DTYPES.index(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Say ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=1024)
def encode(
    kind: str,
    dtype: torch.dtype = torch.uint8,
    numel: int = 0,
    reduction: str = "",
    root: int = NO_ROOT,
    sizes: tuple[int, ...] = (),
    shape: tuple[int, ...] = (),
) -> bytes:
    """Put a call into :data:`CALL_BYTES` bytes; equal calls give equal bytes.

    Args:
        kind: one of :data:`KINDS`.
        dtype: of the elements.
        numel: how many elements a rank gives or takes, where that is the same on every rank.
        reduction: one of :data:`OPERATIONS`, or empty.
        root: the rank in the group that gives or takes alone.
        sizes: the numbers of elements for or from each rank, where they differ.
        shape: of the tensor, where it is the same on every rank, in place of `sizes`; of a vector
            `numel` says enough.
    """
    has_shape = kind in _WITH_SHAPES and len(shape) > 1
    count, code = (len(shape), _packed(shape)) if has_shape else (len(sizes), _fingerprint(sizes))
    return _FORM.pack(
        KINDS.index(kind),
        dtype_code(dtype),
        _REDUCTIONS.index(reduction) if reduction else NO_REDUCTION,
        root,
        numel,
        count,
        code,
    )


def _fingerprint(sizes: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(sizes)}q", *sizes)) if sizes else 0


def _packed(shape: Sequence[int]) -> int:
    """Put four small dimensions into 64 bits, or the fingerprint of others."""
    if len(shape) > 4 or max(shape) >= 1 << 16:
        return _fingerprint(shape)
    return sum(size << 16 * at for at, size in enumerate(shape))


def _shape_in_words(num_dims: int, packed: int, numel: int) -> str:
    sizes = [packed >> 16 * at & 0xFFFF for at in range(min(num_dims, 4))]
    if num_dims > 4 or math.prod(sizes) != numel:
        return f"in {num_dims} dimensions (fingerprint {packed:08x})"
    return f"in the shape ({', '.join(map(str, sizes))})"


def kind_of(encoded: bytes) -> str:
    """Tell which of :data:`KINDS` a call is."""
    return KINDS[encoded[0]]


def describe(encoded: bytes, ranks: Sequence[int] | None = None) -> str:
    """Say in words what a post asks for: ``all_reduce(SUM) of 1,024 float32 elements``.

    Args:
        encoded: what :func:`encode` returned, on whichever rank.
        ranks: the names of the group's ranks, for the root; their positions by default.
    """
    kind, dtype, reduction, root, numel, num_sizes, code = _FORM.unpack(encoded)
    name = KINDS[kind]
    if KINDS.index("all_reduce") > kind:
        return name
    words = f"{name}({_REDUCTIONS[reduction]})" if reduction != NO_REDUCTION else name
    has_shape = name in _WITH_SHAPES
    is_one_size = has_shape or (not num_sizes and name != "all_to_all")
    words += f" of {f'{numel:,} ' if is_one_size else ''}{dtype_name(DTYPES[dtype])} elements"
    if num_sizes and has_shape:
        words += f" {_shape_in_words(num_sizes, code, numel)}"
    elif num_sizes:
        words += f" in parts of {num_sizes} different sizes (fingerprint {code:08x})"
    if root != NO_ROOT:
        words += f" with root {ranks[root] if ranks else root}"
    return words


def call_of_each(
    kind: str,
    vector: torch.Tensor,
    of_each: Sequence[torch.Tensor],
    rank: int,
    num_ranks: int,
    reduction: str = "",
) -> bytes:
    """Encode an all_gather or a reduce_scatter: a vector, and one of or for each rank."""
    _check_one_each(of_each, num_ranks)
    _check_same_dtype(vector, *of_each)
    _check_size(vector, of_each[rank])
    sizes = tuple(one.numel() for one in of_each)
    if len(set(sizes)) > 1:
        return encode(kind, vector.dtype, 0, reduction, sizes=sizes)
    return encode(kind, vector.dtype, sizes[0], reduction)


def all_to_all_call(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], num_ranks: int
) -> bytes:
    """Encode an all_to_all; its sizes differ between ranks and are exchanged later."""
    _check_one_each(inputs, num_ranks)
    _check_one_each(outputs, num_ranks)
    _check_same_dtype(*inputs, *outputs)
    return encode("all_to_all", inputs[0].dtype)


def rooted_call(
    kind: str,
    vector: torch.Tensor,
    at_root: Sequence[torch.Tensor],
    root: int,
    rank: int,
    num_ranks: int,
) -> bytes:
    """Encode a gather or a scatter: a vector on every rank, a list of them at the root."""
    check_rank("root", root, num_ranks)
    _check_one_each(at_root, num_ranks if rank == root else 0)
    _check_same_dtype(vector, *at_root)
    for one in at_root:
        _check_size(vector, one)
    return encode(kind, vector.dtype, vector.numel(), root=root)


def check_rank(role: str, rank: int, num_ranks: int) -> None:
    """Refuse a rank that the group does not have.

    Raises:
        ValueError: with those that it has.
    """
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


def _check_one_each(tensors: Sequence[torch.Tensor], num_ranks: int) -> None:
    if len(tensors) != num_ranks:
        raise ValueError(
            f"the list must have {num_ranks} tensors here, one for each rank (none where a "
            f"single rank gives or takes and this is another), but has {len(tensors)}."
        )
