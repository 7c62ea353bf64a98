"""Lists of tensors that go from one device to another: small ones travel together.

A copy between devices takes the host many microseconds, however small it is, and models have
hundreds of small parameters::

    tensors there   ▪▪▪▪ ██████        ▪▪▪▪ are joined, copied once and taken apart; large ones go
    tensors here    ▪▪▪▪ ██████        from where they lie to where they lie
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from unisono.device import Copies, in_memory_order
from unisono.state.contents import is_dense

SMALL_BYTES = 2**20


def cross(
    copies: Sequence[Copies], into: Sequence[Sequence[torch.Tensor]], source: Sequence[torch.Tensor]
) -> None:
    """Copy tensors of one device to tensors of some others.

    Args:
        copies: of the device of `source`, for each of the others.
        into: on each of the others, as many as there are in `source`, of the same shapes.
        source: tensors.
    """
    for each, there in zip(copies, into, strict=True):
        if each.are_direct and source:
            torch._foreach_copy_(list(there), list(source))
    far = [(e, there) for e, there in zip(copies, into, strict=True) if not e.are_direct]
    if not far:
        return
    large, small = [], defaultdict(list)
    for at, tensor in enumerate(source):
        if tensor.nbytes > SMALL_BYTES or not all(_is_alike(there[at], tensor) for _, there in far):
            large.append(at)
        elif tensor.numel():
            small[tensor.dtype].append(at)
    for each, there in far:
        for at in large:
            each.to_other(there[at], source[at])
    for places in small.values():
        joined = torch.cat([in_memory_order(source[at]) for at in places])
        for each, there in far:
            _arrive(each, [there[at] for at in places], joined)


def _arrive(copies: Copies, into: list[torch.Tensor], joined: torch.Tensor) -> None:
    arrived = torch.empty_like(joined, device=into[0].device)
    copies.to_other(arrived, joined)
    parts = torch.split(arrived, [tensor.numel() for tensor in into])
    torch._foreach_copy_([in_memory_order(tensor) for tensor in into], list(parts))


def _is_alike(there: torch.Tensor, here: torch.Tensor) -> bool:
    """Tell whether elements lie in the same order in two dense tensors."""
    is_strided = here.layout == torch.strided
    return is_strided and there.stride() == here.stride() and is_dense(here.shape, here.stride())
