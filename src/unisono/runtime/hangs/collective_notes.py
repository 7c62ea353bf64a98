"""Which collective has a rank called last, with which tensor shapes? Each rank records it.

A stack shows the name and line of a call, but no tensors. So before each collective that Python
code calls, on any backend, a worker writes a line of text to its control block: this takes two
microseconds and no communication. Collectives called from C++ (the sums of DDP) are not recorded.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unisono.runtime.dtypes import dtype_name
from unisono.runtime.forbidden import public_name
from unisono.runtime.workers.control_block import ControlBlock

METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
)
_PEER = {"send": "to", "recv": "from"}


def noting(control: ControlBlock, rank: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a method of torch's groups record its calls in this process."""
    from torch.distributed import get_process_group_ranks

    pid, known = os.getpid(), dict[str, str]()

    def among(group: Any) -> str:
        if group.group_name not in known:
            ranks = ", ".join(map(str, get_process_group_ranks(group)))
            known[group.group_name] = f" among ranks {ranks}"
        return known[group.group_name]

    def note(name: str, group: Any, args: Sequence[Any]) -> None:
        if os.getpid() != pid:  # a fork is not a rank
            return
        words = in_words(name, args)
        if group.size() != control.world_size and " rank " not in words:
            words += among(group)
        control.note_call(rank, words.encode())

    def ours(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(group: Any, *args: Any, **kwargs: Any) -> Any:
            # A failed record must not fail the collective, and torch reports wrong arguments.
            with contextlib.suppress(Exception):
                note(call.__name__, group, (*args, *kwargs.values()))
            return call(group, *args, **kwargs)

        return noted

    return ours


def in_words(name: str, args: Sequence[Any]) -> str:
    """Describe a call: ``all_reduce of float32 [3, 4]``."""
    public = public_name(name)
    tensors = list(_tensors(args[0])) if args else []
    text = public
    if tensors:
        first = tensors[0]
        of = f"{len(tensors)} × " if len(tensors) > 1 else ""
        text += f" of {of}{dtype_name(first.dtype)} {list(first.shape)}"
    if name in _PEER and len(args) > 1 and isinstance(args[1], int):
        text += f" {_PEER[name]} rank {args[1]}"
    return text


def _tensors(given: Any) -> Iterator[Any]:
    """Yield the tensors in an argument, which may be one, a list, or a list of lists."""
    if hasattr(given, "dtype"):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _tensors(one)
