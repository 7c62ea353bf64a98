"""How is a batch cut? Into contiguous chunks, as ``torch.chunk`` cuts, whatever devices there are.

::

    shards=4, a batch of 10      0 1 2 | 3 4 5 | 6 7 8 | 9       four chunks
    shards=4, a batch of 5       0 1 | 2 3 | 4                   three
    shards=4, a batch of 1       0                               one

Chunks have ⌈batch / shards⌉ samples each, and the last one what is left. The devices share them as
workers share shards: each a contiguous range, sizes differing by at most one. Every tensor is
cut; everything else is given to each chunk as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from unisono.data_parallel.nests import like_dict, rebuilt, tensors_in
from unisono.plan.shards import assign

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a forward pass is called with."""


def count_chunks(args: tuple[Any, ...], kwargs: dict[str, Any], shards: int, dim: int) -> int:
    """Count the chunks of a batch.

    Args:
        args, kwargs: what the module is called with.
        shards: the most chunks.
        dim: the dimension that tensors are cut in.

    Returns:
        At most `shards`; 1 where there is nothing to cut and nothing to give to several, and also
        for an empty batch.

    Raises:
        TypeError: an input cannot be cut.
        ValueError: a tensor has no dimension `dim`, or tensors give different numbers of chunks.
    """
    if not args and not kwargs:
        return 1
    _refuse_packed([*args, *kwargs.values()])
    found = [*tensors_in(args, "args"), *tensors_in(kwargs, "kwargs")]
    counts = {path: _count(path, tensor, shards, dim) for path, tensor in found}
    if len(set(counts.values())) > 1:
        sizes = {path: tensor.shape[dim] for path, tensor in found}
        first = found[0][0]
        other = next(path for path in counts if counts[path] != counts[first])
        raise ValueError(
            f"all tensors of a batch must be cut into equally many chunks, but `{first}` has "
            f"{sizes[first]} in dimension {dim}, which makes {counts[first]} of at most {shards}, "
            f"and `{other}` has {sizes[other]}, which makes {counts[other]}: give them the same "
            f"size there, and what all samples share as a buffer of the module."
        )
    return next(iter(counts.values()), shards)


def places(num_chunks: int, devices: Sequence[torch.device]) -> list[torch.device]:
    """Choose the device of each chunk."""
    ranges = assign(num_chunks, min(num_chunks, len(devices)))
    return [device for device, chunks in zip(devices, ranges, strict=False) for _ in chunks]


def cut(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Sequence[torch.device],
    dim: int,
    *,
    owned: bool = True,
) -> list[Inputs]:
    """Cut a batch into one chunk for each entry of `devices`, and bring each there.

    Args:
        args, kwargs: what the module is called with.
        devices: of each chunk, as many as :func:`count_chunks` says.
        dim: the dimension that tensors are cut in.
        owned: whether a chunk has memory of its own also where its tensor is on its device
            already, so that a module that writes to its inputs does the same on all devices.
    """

    pieces = partial(_pieces, devices=devices, dim=dim, owned=owned)
    return list(zip(pieces(args), pieces(kwargs), strict=True))


def _pieces(nest: Any, *, devices: Sequence[torch.device], dim: int, owned: bool) -> list[Any]:
    # A function that calls itself, not one inside of another: that would be a cycle of references.
    pieces = partial(_pieces, devices=devices, dim=dim, owned=owned)
    if isinstance(nest, PackedSequence):  # only where it is one chunk
        packed: Any = nest  # whose types know of no devices
        return [packed.to(device) for device in devices]
    if isinstance(nest, torch.Tensor):
        parts = nest.chunk(len(devices), dim) if len(devices) > 1 else [nest]
        return [
            part.to(device, non_blocking=True, copy=owned)
            for part, device in zip(parts, devices, strict=True)
        ]
    if isinstance(nest, (list, tuple)) and nest:
        return [rebuilt(nest, values) for values in zip(*map(pieces, nest), strict=True)]
    if isinstance(nest, dict) and nest:
        columns = zip(*map(pieces, nest.values()), strict=True)
        return [like_dict(nest, zip(nest, values, strict=True)) for values in columns]
    return [nest] * len(devices)


def _count(path: str, tensor: torch.Tensor, shards: int, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"every tensor of a batch must have a dimension {dim} to be cut in, but `{path}` has "
            f"shape {tuple(tensor.shape)}: pass a number instead (`.item()`), or keep it in the "
            f"module as a buffer."
        )
    size = tensor.shape[dim]
    each = -(-size // shards) or 1
    return -(-size // each) or 1


def _refuse_packed(nest: Any) -> None:
    if isinstance(nest, PackedSequence):
        raise TypeError(
            "inputs must be tensors that are cut along the batch, but one is a PackedSequence: "
            "pass padded sequences and their lengths, and pack inside of the module."
        )
    if isinstance(nest, (list, tuple)):
        for value in nest:
            _refuse_packed(value)
    elif isinstance(nest, dict):
        _refuse_packed([*nest.values()])
