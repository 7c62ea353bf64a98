"""How do the chunks' outputs become one? Each tensor is concatenated in the chunks' order."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from unisono.data_parallel.nests import like_dict, rebuilt

_SCALARS = (
    "Was asked to gather along dimension 0, but all input tensors were scalars; will instead "
    "unsqueeze and return a vector."
)
"""torch's own words, as programs may filter this warning."""
_FORWARD = 6  # frames up to whoever called the module


def join(outputs: Sequence[Any], device: torch.device, dim: int, path: str = "output") -> Any:
    """Concatenate the outputs of all chunks.

    Args:
        outputs: of each chunk, in order: tensors in tuples, lists and dicts, or None.
        device: where the results go.
        dim: along which tensors are concatenated. Scalars become a vector, with torch's warning.
        path: what they are called in messages.

    Raises:
        TypeError: an output is of another kind.
        ValueError: chunks return different kinds, keys, lengths or shapes.
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
        keys = [*first]
        if any(set(each) != set(first) for each in outputs):
            raise ValueError(
                f"every chunk must return a dict with the same keys, but `{path}` has "
                f"{' and '.join(str(sorted(map(str, each))) for each in outputs)}."
            )
        return like_dict(
            first,
            [
                (key, join([each[key] for each in outputs], device, dim, f"{path}[{key!r}]"))
                for key in keys
            ],
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
