"""How is a batch cut? Into contiguous chunks, as by ``torch.chunk``, independent of the devices.

::

    shards=4, a batch of 10      0 1 2 | 3 4 5 | 6 7 8 | 9       four chunks
    shards=4, a batch of 5       0 1 | 2 3 | 4                   three
    shards=4, a batch of 1       0                               one

Chunks have ⌈batch / shards⌉ samples each, and the last one has the rest. Devices divide chunks as
workers divide shards: each gets a contiguous range, with sizes that differ by at most one. Every
tensor is cut; other values are passed to each chunk unchanged. Outputs are concatenated in order.

Tensors are found inside of tuples, named tuples, lists and dicts, at any depth, as by torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from unisono.plan.shards import assign
from unisono.runtime.arrivals import changed_within


def parts_in(nest: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all parts that are not containers, with their paths, such as ``"args[0]['mask']"``."""
    if isinstance(nest, PackedSequence) or not isinstance(nest, (dict, list, tuple)):
        yield path, nest
        return
    for key, value in nest.items() if isinstance(nest, dict) else enumerate(nest):
        yield from parts_in(value, f"{path}[{key!r}]")


def tensors_in(nest: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors, with their paths."""
    return (found for found in parts_in(nest, path) if isinstance(found[1], torch.Tensor))


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a forward pass."""


def count_chunks(args: tuple[Any, ...], kwargs: dict[str, Any], shards: int, dim: int) -> int:
    """Return the number of chunks: at most `shards`; 1 if the batch is empty or nothing is cut."""
    if not args and not kwargs:
        return 1
    parts = [*parts_in(args, "args"), *parts_in(kwargs, "kwargs")]
    if any(isinstance(part, PackedSequence) for _, part in parts):
        raise TypeError(
            "inputs must be tensors that are cut along the batch, but one is a PackedSequence: "
            "pass padded sequences and their lengths, and pack inside of the module."
        )
    found = [(path, part) for path, part in parts if isinstance(part, torch.Tensor)]
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


def places(num_chunks: int, devices: Sequence[torch.device]) -> list[torch.device]:
    """Return the device of each chunk."""
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
    """Cut a batch into one chunk for each entry of `devices`, and copy each chunk there.

    If `owned`, a chunk is copied even if its tensor is already on its device, so that a module that
    writes to its inputs behaves the same on all devices.
    """
    pieces: dict[int, Sequence[Any]] = {}
    for _, part in parts_in((args, kwargs), ""):
        if isinstance(part, PackedSequence):  # only if there is one chunk
            packed: Any = part  # whose type stubs lack devices
            pieces[id(part)] = [packed.to(device) for device in devices]
        elif isinstance(part, torch.Tensor) and id(part) not in pieces:
            cuts = part.chunk(len(devices), dim) if len(devices) > 1 else [part]
            pieces[id(part)] = [
                piece.to(device, non_blocking=True, copy=owned)
                for piece, device in zip(cuts, devices, strict=True)
            ]

    def chunk(at: int) -> Inputs:
        here = {of: each[at] for of, each in pieces.items()}
        inputs: Inputs = changed_within((args, kwargs), lambda part: here.get(id(part)))
        return inputs

    return [chunk(at) for at in range(len(devices))]


_SCALARS = (
    "Was asked to gather along dimension 0, but all input tensors were scalars; will instead "
    "unsqueeze and return a vector."
)
"""torch's own text, as programs may filter this warning."""
_FORWARD = 6  # frames up to the caller of the module


def join(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Concatenate all chunks' outputs (tensors, or None, in tuples, lists and dicts) on a device.

    Scalars become a vector, with torch's warning.
    """
    columns = [dict(parts_in(output, "output")) for output in outputs]
    joined = []
    for path in dict.fromkeys(path for column in columns for path in column):
        if any(path not in column for column in columns):
            raise ValueError(
                f"every chunk must return the same keys and equally many values, but `{path}` is "
                f"not in all of them: have the module return the same for every batch."
            )
        parts = [column[path] for column in columns]
        if all(isinstance(part, torch.Tensor) for part in parts):
            joined.append(_join_tensors(parts, device, dim, path))
        elif any(part is not None for part in parts):
            kinds = " and ".join(sorted({type(part).__name__ for part in parts}))
            raise TypeError(
                f"a module must return tensors, or None from every chunk, in tuples, lists and "
                f"dicts, but `{path}` is of {kinds}: return a tensor with a value for each sample."
            )
    there = iter(joined)  # in the order of the first chunk, which `changed_within` follows
    return changed_within(
        outputs[0], lambda part: next(there) if isinstance(part, torch.Tensor) else None
    )


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
    if not -len(shape) <= dim < len(shape):
        return None
    dim %= len(shape)
    return shape[:dim] + shape[dim + 1 :]
