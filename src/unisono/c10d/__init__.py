"""torch's collectives over shared memory, in one order of summation: the c10d backend "unisono".

``import unisono``, then ``torch.distributed.init_process_group("unisono")``; every program that
speaks ``torch.distributed`` on the CPUs of one Linux host runs on it. :func:`empty` makes tensors
that the backend reduces where they lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.c10d.shared_tensors import empty

__all__ = ["empty"]


def __getattr__(name: str) -> Any:
    if name != "empty":  # it needs torch, which the launcher, who imports us, never loads
        raise AttributeError(f"module 'unisono.c10d' has no attribute {name!r}")
    from unisono.c10d.shared_tensors import empty

    return empty
