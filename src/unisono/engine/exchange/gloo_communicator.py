"""The communicator of CPUs: gloo, on the loopback interface or between hosts.

There are two groups, as calls of one group must start in the same order on all workers: sums are
gathered as soon as they are complete, no matter which transfers have started by then.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work
from typing_extensions import override

from unisono.engine.exchange.communicator import BrokenError, Communicator, Transfer, connect
from unisono.runtime.workers.team import Team

_LOOK_EVERY, _LOOK_EVERY_S = timedelta(milliseconds=50), 0.05
# After this a call fails, and its callers make another group: the control block's barrier waits for
# late workers and decides whether they are lost.
_TIMEOUT = timedelta(seconds=30)
# Connecting takes milliseconds, or some round trips between hosts. gloo gives up after five times
# as long.
_CONNECT_WITHIN, _CONNECT_HOSTS_WITHIN = timedelta(milliseconds=500), timedelta(seconds=2)


@final
class GlooTransfer(Transfer):
    """A call of a gloo group."""

    def __init__(self, work: Work, *tensors: torch.Tensor) -> None:
        self.work = work
        # Tensors must outlive gloo's threads, which cannot free them without the GIL.
        self._tensors = tensors

    @property
    @override
    def is_ready(self) -> bool:
        return self.work.is_completed()

    @override
    def join(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise BrokenError(str(error)) from error


@final
class GlooCommunicator(Communicator):
    """Moves bytes from memory to memory."""

    def __init__(self, team: Team) -> None:
        self._team, self.membership = team, team.membership
        self._groups: list[Any] = []
        self._under_way: list[GlooTransfer] = []
        address, within = team.supervisor.address, _CONNECT_WITHIN
        if address:
            device = ProcessGroupGloo.create_device(hostname=address)
            within = _CONNECT_HOSTS_WITHIN
        else:
            device = ProcessGroupGloo.create_device(interface="lo")
        position, size = team.position, team.size

        def make(store: Store) -> Any:
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [device]
            options._timeout, options._threads = within, 1
            group: Any = ProcessGroupGloo(store, position, size, options)
            group.set_timeout(_TIMEOUT)
            return group

        self._groups = connect(team, make, number=2)

    @override
    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Transfer:
        work = self._groups[0].alltoall_base(received, sent, from_each, to_each)
        return self._begun(work, received, sent)

    @override
    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Transfer:
        return self._begun(self._groups[1]._allgather_base(received, sent), received, sent)

    @override
    def wait(self, transfer: Transfer, patience_s: float = math.inf) -> bool:
        assert isinstance(transfer, GlooTransfer)
        until_s = time.monotonic() + patience_s
        while True:
            try:
                transfer.work.wait(_LOOK_EVERY)
            except RuntimeError:
                if transfer.work.is_completed():
                    transfer.join()  # raises the failure; or the bytes have just arrived
                    return True
            else:
                return True
            if self._team.has_lost:
                raise BrokenError("a worker was lost")
            if time.monotonic() > until_s:
                return False

    @override
    def close(self) -> None:
        groups, self._groups = self._groups, []
        under_way = [transfer for transfer in self._under_way if not transfer.is_ready]
        self._under_way = []
        if groups and under_way:
            # A group ends when its calls have, and would keep Python waiting until then.
            threading.Thread(
                target=_outlive, args=(groups, under_way), name="unisono-closing", daemon=True
            ).start()

    def __del__(self) -> None:
        """Close the communicator if nobody did."""
        self.close()

    def _begun(self, work: Work, *tensors: torch.Tensor) -> GlooTransfer:
        self._under_way = [transfer for transfer in self._under_way if not transfer.is_ready]
        self._under_way.append(GlooTransfer(work, *tensors))
        return self._under_way[-1]


def _outlive(groups: list[Any], transfers: Sequence[GlooTransfer]) -> None:
    while not all(transfer.is_ready for transfer in transfers):
        time.sleep(_LOOK_EVERY_S)
    groups.clear()
