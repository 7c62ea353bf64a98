"""Which call do these tensors make? Checked on this rank, then encoded for all to compare.

What is wrong on this rank alone (a list that is too short, two dtypes in one call) is refused here,
in words; what differs between ranks shows in the encoded calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.c10d.calls import encode

_Vectors = Sequence[torch.Tensor]


def all_gather_call(outputs: _Vectors, vector: torch.Tensor, rank: int, num_ranks: int) -> bytes:
    """Encode an all_gather of `vector` into one output per rank."""
    _check_one_each(outputs, num_ranks)
    _check_same_dtype(vector, *outputs)
    _check_size(vector, outputs[rank])
    numel, sizes = _sizes(outputs)
    return encode("all_gather", vector.dtype, numel, sizes=sizes)


def reduce_scatter_call(
    output: torch.Tensor, inputs: _Vectors, reduction: str, rank: int, num_ranks: int
) -> bytes:
    """Encode a reduce_scatter of one input per rank into `output`."""
    _check_one_each(inputs, num_ranks)
    _check_same_dtype(output, *inputs)
    _check_size(output, inputs[rank])
    numel, sizes = _sizes(inputs)
    return encode("reduce_scatter", output.dtype, numel, reduction, sizes=sizes)


def all_to_all_call(outputs: _Vectors, inputs: _Vectors, num_ranks: int) -> bytes:
    """Encode an all_to_all; its sizes differ between ranks and are exchanged later."""
    _check_one_each(inputs, num_ranks)
    _check_one_each(outputs, num_ranks)
    _check_same_dtype(*inputs, *outputs)
    return encode("all_to_all", inputs[0].dtype)


def rooted_call(
    kind: str, vector: torch.Tensor, at_root: _Vectors, root: int, rank: int, num_ranks: int
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


def _sizes(vectors: _Vectors) -> tuple[int, tuple[int, ...]]:
    """Tell the size that all vectors have, or their sizes if they differ."""
    sizes = tuple(vector.numel() for vector in vectors)
    return (0, sizes) if len(set(sizes)) > 1 else (sizes[0], ())


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
