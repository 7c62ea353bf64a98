"""How is a batch cut? Into contiguous chunks, as ``torch.chunk`` cuts, whatever devices there are.

::

    shards=4, a batch of 10      0 1 2 | 3 4 5 | 6 7 8 | 9       four chunks
    shards=4, a batch of 5       0 1 | 2 3 | 4                   three
    shards=4, a batch of 1       0                               one

Chunks have ⌈batch / shards⌉ samples each, and the last one what is left. The devices share them as
workers share shards: each a contiguous range, sizes differing by at most one. Every tensor is
cut; everything else is given to each chunk as it is. The chunks' outputs become one: each tensor is
concatenated in the chunks' order.

Tensors may be inside of tuples, named tuples, lists and dicts, however deep, as torch finds them.
Anything else is left as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from unisono.plan.shards import assign
from unisono.runtime.arrivals import like


def tensors_in(nest: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Find all tensors, each with where it is, such as ``"[0]['mask']"``."""
    if isinstance(nest, torch.Tensor):
        yield path, nest
    elif isinstance(nest, (list, tuple)):
        for position, value in enumerate(nest):
            yield from tensors_in(value, f"{path}[{position}]")
    elif isinstance(nest, dict):
        for key, value in nest.items():
            yield from tensors_in(value, f"{path}[{key!r}]")


def rebuilt(nest: Any, values: Iterable[Any]) -> Any:
    """Make a tuple, named tuple or list of the same type from other values."""
    return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a forward pass is called with."""


def count_chunks(args: tuple[Any, ...], kwargs: dict[str, Any], shards: int, dim: int) -> int:
    """Count the chunks of a batch: at most `shards`; 1 if it is empty or nothing is to be cut."""
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

    If `owned`, a chunk has memory of its own also where its tensor is on its device already, so
    that a module that writes to its inputs does the same on all devices.
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
        return [like(nest, dict(zip(nest, values, strict=True))) for values in columns]
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


_SCALARS = (
    "Was asked to gather along dimension 0, but all input tensors were scalars; will instead "
    "unsqueeze and return a vector."
)
"""torch's own words, as programs may filter this warning."""
_FORWARD = 6  # frames up to whoever called the module


def join(outputs: Sequence[Any], device: torch.device, dim: int, path: str = "output") -> Any:
    """Concatenate all chunks' outputs (tensors, or None, in tuples, lists and dicts) on a device.

    Scalars become a vector, with torch's warning. `path` is what they are called in messages.
    """
    first = outputs[0]
    if any((each is None) != (first is None) or _kind(each) != _kind(first) for each in outputs):
        kinds = " and ".join(sorted({type(each).__name__ for each in outputs}))
        raise ValueError(
            f"every chunk must return the same kind of thing, but `{path}` is of {kinds}: have "
            f"the module return the same for every batch."
        )
    if first is None:
        return None
    if isinstance(first, torch.Tensor):
        return _join_tensors(outputs, device, dim, path)
    if isinstance(first, dict):
        if any(set(each) != set(first) for each in outputs):
            raise ValueError(
                f"every chunk must return a dict with the same keys, but `{path}` has "
                f"{' and '.join(str(sorted(map(str, each))) for each in outputs)}."
            )
        return like(
            first,
            {
                key: join([each[key] for each in outputs], device, dim, f"{path}[{key!r}]")
                for key in first
            },
        )
    if isinstance(first, (list, tuple)):
        if any(len(each) != len(first) for each in outputs):
            raise ValueError(
                f"every chunk must return equally many values, but `{path}` has "
                f"{' and '.join(str(len(each)) for each in outputs)}."
            )
        return rebuilt(
            first,
            [
                join(values, device, dim, f"{path}[{position}]")
                for position, values in enumerate(zip(*outputs, strict=True))
            ],
        )
    raise TypeError(
        f"a module must return tensors, or None, in tuples, lists and dicts, but `{path}` is a "
        f"{type(first).__name__}: return a tensor with a value for each sample."
    )


def _kind(output: Any) -> type:
    for kind in (torch.Tensor, dict, list, tuple):
        if isinstance(output, kind):
            return kind
    return type(output)


def _join_tensors(
    tensors: Sequence[torch.Tensor], device: torch.device, dim: int, path: str
) -> torch.Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(_SCALARS, stacklevel=_FORWARD)
        tensors = [tensor.view(1) for tensor in tensors]
    shapes = [_without(tuple(tensor.shape), dim) for tensor in tensors]
    for chunk, shape in enumerate(shapes):
        if shape is None or shape != shapes[0]:
            raise ValueError(
                f"outputs must have equal sizes in all dimensions but {dim}, along which they are "
                f"concatenated, but `{path}` has shape {tuple(tensors[0].shape)} in chunk 0 and "
                f"{tuple(tensors[chunk].shape)} in chunk {chunk}: pad to one size, such as with "
                f"`total_length` of `pad_packed_sequence`."
            )
    there = [tensor.to(device, non_blocking=device.type != "cpu") for tensor in tensors]
    return torch.cat(there, dim) if len(there) > 1 else there[0]


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...] | None:
    """Leave out one dimension; None if it is not there."""
    if not -len(shape) <= dim < len(shape):
        return None
    dim %= len(shape)
    return shape[:dim] + shape[dim + 1 :]
