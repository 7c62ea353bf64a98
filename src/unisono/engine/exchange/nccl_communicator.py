"""The communicator of GPUs that see each other: NCCL. Never run on a GPU.

There is one group and one separate stream: sums are added and sent during the backward pass, in the
order of the calls, without the host. If a member is lost, NCCL would wait forever, in the stream
and then in any call that waits for the stream; so a thread polls the control block and aborts the
group. The results of work that was in the stream are discarded then.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, final

import torch
from torch._C._distributed_c10d import Store
from typing_extensions import override

from unisono.engine.exchange.communicator import BrokenError, Communicator, Transfer, connect
from unisono.runtime.workers.interfaces import interface_here
from unisono.runtime.workers.team import Team

_LOOK_EVERY_S = 0.02
_SPIN_S, _SLEEP_S = 1e-3, 5e-5
# Of a wait for a transfer that all workers have started: the control block's barrier waits for late
# workers and decides whether they are lost.
_TIMEOUT_S = 60.0
_ABORTED_WITHIN_S = 10.0
_NEVER = timedelta(days=1)
# This module, not torch's threads, decides when to end a group or a process.
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
}
_INTERFACE = "NCCL_SOCKET_IFNAME"  # over which members connect


@final
class NcclTransfer(Transfer):
    """A call of an NCCL group."""

    is_ready = True

    def __init__(self, work: Any, *tensors: torch.Tensor) -> None:
        self.work = work
        self._tensors = tensors

    @override
    def join(self) -> None:
        with _broken_if_it_fails():
            self.work.wait()


@final
class NcclCommunicator(Communicator):
    """Moves bytes between GPUs.

    Args:
        make: makes the group, given a store, a rank, a size and the device.
    """

    def __init__(
        self, team: Team, device: torch.device, make: Callable[..., Any] | None = None
    ) -> None:
        self._team, self.membership = team, team.membership
        self._module: Any = torch.get_device_module(device)
        self._is_aborted = threading.Event()
        self._aborting = threading.Lock()
        self._group: Any = None
        position, size = team.position, team.size
        interface = {_INTERFACE: "lo"}
        if team.supervisor.address:
            interface = {_INTERFACE: os.environ.get(_INTERFACE) or f"={interface_here()}"}
        with _settings({**_ENVIRONMENT, **interface}):
            [self._group] = connect(
                team, lambda store: (make or _make)(store, position, size, device)
            )
        self._stream = self._module.Stream(device)
        self._guard = threading.Thread(target=self._watch, name="unisono-guard", daemon=True)
        self._guard.start()

    @override
    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Transfer:
        with _broken_if_it_fails():
            work = self._group.alltoall_base(received, sent, from_each, to_each)
        return NcclTransfer(work, received, sent)

    @override
    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Transfer:
        with _broken_if_it_fails():
            work = self._group._allgather_base(received, sent)
        return NcclTransfer(work, received, sent)

    @override
    def aside(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = self._module.stream(self._stream)
        return stream

    @override
    def wait(self, transfer: Transfer, patience_s: float = math.inf) -> bool:
        with self.aside():
            transfer.join()
            event = self._stream.record_event()
        start = time.monotonic()
        while not event.query() and not self._is_aborted.is_set():
            waited_s = time.monotonic() - start
            if waited_s > patience_s:
                return False
            if waited_s > _TIMEOUT_S:
                self._abort()
                raise BrokenError(f"bytes of another worker did not come in {waited_s:.0f} s")
            os.sched_yield() if waited_s < _SPIN_S else time.sleep(_SLEEP_S)
        # The event is set before the group is aborted, so bytes that arrived before are complete.
        if self._is_aborted.is_set():
            raise BrokenError("a worker was lost")
        return True

    @override
    def close(self) -> None:
        self._abort()
        if threading.current_thread() is not self._guard:
            self._guard.join()

    def _watch(self) -> None:
        while not self._is_aborted.wait(_LOOK_EVERY_S):
            if self._team.has_lost:
                self._abort()

    def _abort(self) -> None:
        """Abort the group once, without waiting for NCCL too long."""
        with self._aborting:
            if self._is_aborted.is_set():
                return
            self._is_aborted.set()
        aborting = threading.Thread(target=self._group.abort, name="unisono-abort", daemon=True)
        aborting.start()
        aborting.join(_ABORTED_WITHIN_S)


def _make(store: Store, position: int, size: int, device: torch.device) -> Any:
    """Make NCCL's group, connected."""
    from torch._C._distributed_c10d import ProcessGroupNCCL  # of builds for GPUs alone

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    group: Any = ProcessGroupNCCL(store, position, size, options)
    group.eager_connect_single_device(device)
    return group


@contextmanager
def _settings(environment: Mapping[str, str]) -> Iterator[None]:
    # Only if needed: a library's thread may read the environment meanwhile.
    others = [name for name, value in environment.items() if os.environ.get(name) != value]
    before = {name: os.environ.get(name) for name in others}
    os.environ.update({name: environment[name] for name in others})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _broken_if_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise BrokenError(str(error)) from error
