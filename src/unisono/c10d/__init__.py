"""torch's collectives over shared memory, in one order of summation: the c10d backend "unisono".

``import unisono``, then ``torch.distributed.init_process_group("unisono")``; every program that
uses ``torch.distributed`` on the CPUs of one Linux host runs on it. :func:`empty` makes tensors
that the backend reduces where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the launcher, which imports this package, never loads torch
    import torch
    import torch.distributed as dist

__all__ = ["empty"]


def empty(
    shape: int | Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Make an uninitialized tensor in the shared memory of a group.

    It is an ordinary tensor, of this rank alone. ``all_reduce`` over that group reduces it where
    it lies if every rank passes such a tensor, or a contiguous part of one. Its memory is given
    back when the last tensor that shares it is gone, before or after the group is destroyed.

    Args:
        shape: its sizes.
        dtype: torch's default dtype if None.
        group: a group of the backend ``unisono``; the default group if None.

    Returns:
        A contiguous CPU tensor that begins at a multiple of 64 bytes.

    Raises:
        ValueError: the group has another backend.
    """
    import torch
    import torch.distributed as dist

    from unisono.c10d.group import Group

    group = dist.group.WORLD if group is None else group
    if not isinstance(group, Group):
        raise ValueError(
            f"`group` must be a process group of the backend `unisono`, but is {group!r}: make it "
            f'with `init_process_group("unisono")` or `new_group(..., backend="unisono")`.'
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    sizes = torch.Size([shape] if isinstance(shape, int) else shape)
    return group.member.empty(sizes, dtype)
