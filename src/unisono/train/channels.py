"""Images with their channels last: the layout in which convolutions are often faster on a CPU.

Values stay the same, but kernels add in another order, so bits change: the layout belongs to a
run's identity. Parameters keep their strides wherever a run puts them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn


def lay_out_channels_last(model: nn.Module) -> None:
    """Give a model's tensors with four dimensions the layout, as ``model.to(memory_format=…)``.

    Raises:
        ValueError: there are tensors with five dimensions, which torch cannot lay out so.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if tensor.dim() == 5:
            raise ValueError(
                f"`channels_last` is for tensors with four dimensions, but `{name}` has five: "
                f"leave it out, and lay the model out with `torch.channels_last_3d` yourself."
            )
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def with_channels_last(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Have a loss or a forward function (model, batch) get images in that layout."""

    @functools.wraps(compute)
    def with_layout(model: nn.Module, batch: Any) -> Any:
        return compute(model, laid_out(batch))

    return with_layout


def laid_out(batch: Any) -> Any:
    """Lay out the floating tensors with four dimensions that a batch has, however deep it is."""
    if isinstance(batch, torch.Tensor):
        is_image = batch.dim() == 4 and batch.is_floating_point()
        return batch.to(memory_format=torch.channels_last) if is_image else batch
    if isinstance(batch, MutableMapping):
        # A copy keeps what a mapping of somebody's own has beside its items.
        other = copy.copy(batch)
        other.update({key: laid_out(value) for key, value in batch.items()})
        return other
    if isinstance(batch, Mapping):
        return {key: laid_out(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(laid_out, batch))
    if type(batch) in (list, tuple):
        return type(batch)(map(laid_out, batch))
    return batch
