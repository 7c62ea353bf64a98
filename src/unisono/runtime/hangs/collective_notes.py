"""Which collective has a rank called last, with tensors of which shape? It notes that itself.

A stack shows the name of a call and its line, but no tensor. So before each collective that Python
code makes, on any backend, a worker writes a line of text into its control block: two microseconds,
no exchange with anybody. Those that C++ makes (the sums of DDP) are not noted.
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

_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
)
_PEER = {"send": "to", "recv": "from"}


def note_collectives(control: ControlBlock, rank: int) -> None:
    """Have each collective of this process noted from now on."""
    from torch.distributed import ProcessGroup, get_process_group_ranks

    pid = os.getpid()

    known: dict[str, str] = {}

    def among(group: Any) -> str:
        if group.group_name not in known:
            ranks = ", ".join(map(str, get_process_group_ranks(group)))
            known[group.group_name] = f" among ranks {ranks}"
        return known[group.group_name]

    def note(name: str, group: Any, args: Sequence[Any]) -> None:
        if os.getpid() != pid:  # a fork is no rank
            return
        words = in_words(name, args)
        if group.size() != control.world_size and " rank " not in words:
            words += among(group)
        control.note_call(rank, words.encode())

    for name in _METHODS:
        call = ProcessGroup.__dict__.get(name)
        if call is not None and not hasattr(call, "__wrapped__"):
            setattr(ProcessGroup, name, _noting(name, call, note))


def _noting(
    name: str, call: Callable[..., Any], note: Callable[[str, Any, Sequence[Any]], None]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(group: Any, *args: Any, **kwargs: Any) -> Any:
        # A note is no reason for a collective to fail, and torch says what is wrong with its own.
        with contextlib.suppress(Exception):
            note(name, group, (*args, *kwargs.values()))
        return call(group, *args, **kwargs)

    return noted


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
    """List the tensors in an argument, which may be one, a list, or a list of lists."""
    if hasattr(given, "dtype"):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _tensors(one)
