"""Rejects collectives where workers are not in the same place: inside of a pass.

Each worker computes its own shards, and not all have the same number. A collective there would mix
different shards for each number of workers, or hang. It raises instead::

    forbid(IN_A_PASS) ─► loss, backward ─► dist.all_gather ─► RuntimeError
    forbid("")        ─► callbacks, the program's own code ─► dist.all_gather ─► allowed

The backend `unisono` checks by itself. Python, functional collectives and DDP's C++ reach all other
backends through torch's dispatcher. While a loop runs in a program with a process group, a kernel
in front of each of the dispatcher's collectives checks (8 µs per call). Without a process
group the cost is less than a microsecond per step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
import torch.distributed as dist

IN_A_PASS = "in a pass over a shard"
IN_AN_UPDATE = "in the optimizer's step"

_ADVICE = {
    IN_A_PASS: "there each worker computes different shards, and not all have the same number, so "
    "the result would depend on the number of workers, or they would wait for each other for ever. "
    "Compute a shard's loss from that shard alone, with a model that is not wrapped; "
    "for a loss over the whole global batch (SimCLR, CLIP) pass `WholeBatch(embed, loss)`. "
    "Callbacks, and your own loop outside of `step.shards`, may call collectives, on every worker",
    IN_AN_UPDATE: "the gradients are summed over all workers already, and one worker may update "
    "for all. Pass an optimizer that calls none, such as torch's own",
}
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_any_source": "recv",
    "recv_anysource": "recv",
}
_NAMESPACE = "c10d"
_LOCAL = {"check_for_nan"}  # not collectives
# Every tensor has this key in every mode, and torch registers nothing there.
_KEY = "BackendSelect"

# Per thread: backward passes on the CPU run in the thread that calls them.
_where: ContextVar[str] = ContextVar("unisono_collectives_forbidden", default="")


def forbid(where: str) -> str:
    """Reject collectives in this thread from now on; return the previous value, to restore it.

    ``""`` allows them again.
    """
    before = _where.get()
    _where.set(where)
    if where and dist.is_initialized():
        _gate().put_up()
    return before


def check_allowed(call: str) -> None:
    """Raise if :func:`forbid` applies to a collective."""
    where = _where.get()
    if where:
        raise RuntimeError(
            f"torch.distributed's collectives must be called between steps, but "
            f"`{public_name(call)}` was called {where}: {_ADVICE[where]}."
        )


def public_name(call: str) -> str:
    """Return the public name of a collective in torch.distributed."""
    name = call.strip("_")
    return _NAMES.get(name, name)


@final
class _Gate:
    """Kernels in front of the dispatcher's collectives, while a block needs them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._kernels: Any = None  # a torch.library.Library

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow the kernels within a block; the end of the last block removes them."""
        with self._lock:
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0 and self._kernels is not None:
                    self._kernels._destroy()
                    self._kernels = None

    def put_up(self) -> None:
        """Register the kernels if within a block; takes a millisecond, once."""
        if self._kernels is not None or not self._num_users:
            return
        with self._lock:
            if self._kernels is None:
                make: Any = torch.library.Library
                self._kernels = make(_NAMESPACE, "IMPL")
                for name in torch._C._dispatch_get_all_op_names():
                    namespace, _, rest = name.partition("::")
                    if namespace == _NAMESPACE and rest not in _LOCAL:
                        packet, _, overload = rest.partition(".")
                        each = getattr(getattr(torch.ops.c10d, packet), overload or "default")
                        self._kernels.impl(each, _asking_first(each), _KEY, with_keyset=True)


@functools.cache
def _gate() -> _Gate:
    return _Gate()


def collectives_watched() -> AbstractContextManager[None]:
    """Make :func:`forbid` apply to every backend within a block."""
    return _gate().open()


def _asking_first(overload: Any) -> Callable[..., Any]:
    name = overload.overloadpacket.__name__
    after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        check_allowed(name)
        return overload.redispatch(keys & after, *args, **kwargs)

    return call
