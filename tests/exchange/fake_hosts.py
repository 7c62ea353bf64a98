"""Ranks as threads, on hosts that share no memory: their workers meet on one control block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tests.workers.fake_launcher import Death, FakeLauncher, FakeSupervisor, Job

from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.memory import Memory
from unisono.runtime.workers.supervisor import Gather


def on_hosts(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Put one rank on the first of two hosts, and the others on the second."""
    return ((0,), tuple(range(1, num_ranks))) if num_ranks > 1 else ((0,),)


class FakeHostsLauncher(FakeLauncher):
    """Plays the launchers of several hosts.

    Attributes:
        ranks_of_host: who is where.
        said: what each rank has put beside its arrivals, by parity.
    """

    def __init__(self, control: ControlBlock, ranks_of_host: Sequence[Sequence[int]]) -> None:
        super().__init__(control)
        self.ranks_of_host = tuple(map(tuple, ranks_of_host))
        self.said: dict[tuple[int, int], bytes] = {}


class HostSupervisor(FakeSupervisor):
    """The launcher as one rank on a host sees it."""

    address = "127.0.0.1"

    def __init__(
        self, launcher: FakeHostsLauncher, rank: int, control: ControlBlock, *more: Any
    ) -> None:
        super().__init__(launcher, rank, control, *more)
        self.ranks_of_host = launcher.ranks_of_host
        self._host = next(ranks for ranks in launcher.ranks_of_host if rank in ranks)
        control.attach = partial(self._put, launcher)  # type: ignore[method-assign]
        control.attached = partial(self._beside, launcher)  # type: ignore[method-assign]

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        return self._launcher.memory(100 * key + self._host[0], num_bytes)

    def _put(self, launcher: FakeHostsLauncher, which: int, data: bytes) -> None:
        launcher.said[self.world.rank, which] = data

    def _beside(self, launcher: FakeHostsLauncher, which: int) -> dict[int, bytes]:
        far = [rank for ranks in launcher.ranks_of_host for rank in ranks if rank not in self._host]
        return {rank: launcher.said[rank, which] for rank in far if (rank, which) in launcher.said}


class HostsJob(Job):
    """Runs ``work(team)`` in a thread a rank, on two hosts or those given."""

    supervisor = HostSupervisor

    def __init__(
        self,
        control: ControlBlock,
        deaths: Iterable[Death] = (),
        ranks_of_host: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(control, deaths)
        self.launcher = FakeHostsLauncher(control, ranks_of_host or on_hosts(control.world_size))
