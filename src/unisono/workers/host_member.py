"""A worker of one of several hosts, each with a launcher of ours: lost workers are replaced there.

On each host all is as on a single one: its launcher shares memory, starts a replacement, and has
it run the program up to the loop under way. Then all workers of all hosts begin again together::

    host 0   worker 0  step 812 ─ misses worker 3 ──── waits ────┐
             worker 1  step 812 ─ misses worker 3 ──── waits ────┤ all connect anew, and go back to
    host 1   worker 2  step 812 ─ misses worker 3 ──── waits ────┤ the newest snapshot: step 809 ─►
             worker 3  step 8✕       replaced ─ the program ─────┘

Each host has every snapshot in its launcher's memory, so nothing but a number is agreed on: that of
the newest one that any worker knows to be whole. A worker knows so once all have come to the next
meeting, and before that all had copied their shares; so it is whole everywhere.

Only within a loop's steps is there a snapshot that all can go back to. A worker that is lost
elsewhere (in an evaluation, or before the first step), or with its whole host, ends the run.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from unisono.errors import PeerLostError, UnisonoError
from unisono.timeouts import RENDEZVOUS
from unisono.workers.control_block import ControlBlock
from unisono.workers.host_links import LOST_AFTER_S, connect_hosts
from unisono.workers.hosts_control_block import HostsControlBlock
from unisono.workers.interfaces import address_here
from unisono.workers.launcher_link import LauncherLink
from unisono.workers.launcher_messages import (
    ComputesWrong,
    Live,
    Passed,
    ProgramDone,
    ProgramFailed,
    Told,
)
from unisono.workers.meeting_point import COUNTER, Departure
from unisono.workers.membership import Membership
from unisono.workers.rendezvous import RankPlaces, Rendezvous, prefixed
from unisono.world import HOSTS_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TOKEN_VARIABLE = "UNISONO_JOB"
_WHERE = "where a lost worker is replaced"
_BEGUN = "begun again"


class HostMember(LauncherLink):
    """The end of a worker whose launcher is one of several, one on each host. Final."""

    # Its launcher knows of its own host alone.
    explains_waits = False

    def __init__(self) -> None:
        super().__init__()
        self.ranks_of_host = self._places.ranks_of_host
        self.address = address_here()
        self._store = self._open_store()
        if self._is_replacement:
            self._store.set(f"{self._next}/{self.world.rank} comes", "")

    @property
    def _is_replacement(self) -> bool:
        return self.can_replace and self.incarnation > 0

    @property
    def _next(self) -> int:
        """Count the times that all have begun again, with the next one."""
        return 1 + (int(self._store.get(_BEGUN)) if self._store.check([_BEGUN]) else 0)

    def _map(self, fd: int) -> ControlBlock:
        sizes = map(int, os.environ[HOSTS_VARIABLE].split(","))
        self._places = places_of(self.world.rank, list(sizes))
        self._hosts_control = HostsControlBlock(
            fd, self._places, are_replaced=os.environ.get("UNISONO_RECOVERS") == "1"
        )
        return self._hosts_control

    def connect(self) -> None:
        """Reach the workers of other hosts. Collective: every rank calls it, once.

        A replacement does so when it has caught up with them.

        Raises:
            RendezvousError: another host cannot be reached.
            WaitTimeoutError: a rank did not come in time.
        """
        if not self._is_replacement:
            rendezvous = self._rendezvous("the first time")
            self._hosts_control.connect(connect_hosts(rendezvous, self.address))

    def look(self) -> None:
        """See :class:`Supervisor`; what other hosts have sent says who is lost there."""
        self._hosts_control.receive()

    def tell(self, message: Told) -> None:
        """See :class:`LauncherLink`; the end of the program is told to other hosts, too."""
        if isinstance(message, ComputesWrong):  # a launcher counts the workers of its host
            message = ComputesWrong(
                message.rank - self._places.local_ranks[0], message.pid, message.how
            )
        ends = {ProgramDone: Departure.FINISHED, ProgramFailed: Departure.FAILED}
        if (how := ends.get(type(message))) is not None:
            self.control.leave(self.world.rank, how)
        super().tell(message)

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """See :class:`Supervisor`; returns when all are there again, on all hosts.

        Raises:
            PeerLostError: a worker is lost where the run cannot go back, or cannot be replaced.
        """
        control, rank = self.control, self.world.rank
        ranks = range(self.world.world_size)
        lost = [one for one in ranks if control.departure(one) != Departure.PRESENT]
        if self.newest_snapshot is None or not self.can_go_back:
            raise _ended(lost[0], "outside of the steps of a loop, where nobody can take its place")
        self._store.set(f"{self._next}/{rank} comes", "")
        # Others may wait for this worker where they do not miss the lost one.
        control.leave(rank, Departure.LOST)
        here = super().stopped(arrivals, between_steps=False)
        return self._begin_again(here, arrivals)

    def catch_up(self, index: int, name: str) -> Passed | Live:
        """See :class:`LauncherLink`; the others go back to where the replacement begins."""
        answer = super().catch_up(index, name)
        if isinstance(answer, Passed):
            return answer
        if answer.loop is None:
            raise _ended(self.world.rank, "outside of the steps of a loop")
        return Live(self._begin_again(answer.membership, 0), answer.loop, is_alone=True)

    def _begin_again(self, here: Membership, arrivals: int) -> Membership:
        """Wait for all workers of all hosts, and connect with them anew. Collective.

        Args:
            here: the workers of this host that are there so far.
            arrivals: to how many meetings this worker has come.
        """
        while len(here.ranks) < self._places.local_size:
            here = super().stopped(arrivals, between_steps=True)
        number = self._next
        rendezvous = self._rendezvous(f"{number}")
        mark = 0 if self.newest_snapshot is None else self.newest_snapshot()
        processes = self._processes

        def watch(waited_s: float) -> None:
            if self._processes != processes:
                raise _ended(self.world.rank, "with another of its host, one after the other")
            self._check_replaced(number, waited_s)

        gathering = rendezvous.gathering(_WHERE, RENDEZVOUS.in_s(), watch=watch)
        heard = gathering.gather("workers", [arrivals, mark])
        self.agreed_snapshot = max(mark for _, mark in heard)
        agreed = (max(arrivals for arrivals, _ in heard) + 2) % COUNTER
        links = connect_hosts(rendezvous, self.address)
        self._hosts_control.connect(links, agreed)
        self._store.set(_BEGUN, str(number))
        rendezvous.gather("workers that have connected anew", None)
        return Membership(tuple(range(self.world.world_size)), 0, number)

    @property
    def _processes(self) -> list[tuple[int, int] | None]:
        lines = [self.control.lines[rank] for rank in self._places.local_ranks]
        return [None if line.has_died else line.process for line in lines]

    def _check_replaced(self, number: int, waited_s: float) -> None:
        """Give up where nobody will come in the place of a lost worker."""
        self.look()
        for rank in range(self.world.world_size):
            how = self.control.departure(rank)
            if how == Departure.PRESENT or rank == self.world.rank:
                continue
            if how != Departure.LOST:
                raise _ended(rank, "for good")
            if waited_s > LOST_AFTER_S and not self._store.check([f"{number}/{rank} comes"]):
                raise _ended(rank, f"and nobody took its place within {LOST_AFTER_S:.0f} s")

    def _rendezvous(self, name: str) -> Rendezvous:
        return Rendezvous(
            prefixed(name, self._store),
            self._places,
            lambda rank: self.control.departure(rank) not in (Departure.PRESENT, Departure.LOST),
        )

    def _open_store(self) -> Store:
        from torch._C._distributed_c10d import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=RENDEZVOUS.in_s())
        store = TCPStore(address, port, None, False, limit, wait_for_workers=False)
        return prefixed(f"unisono/{os.environ[TOKEN_VARIABLE]}", store)


def places_of(rank: int, sizes: list[int]) -> RankPlaces:
    """Say who is where, of ranks counted host by host.

    Args:
        rank: this worker.
        sizes: how many workers each host has.
    """
    hosts = [str(host) for host, size in enumerate(sizes) for _ in range(size)]
    return RankPlaces.of(rank, hosts)


def _ended(rank: int, how: str) -> UnisonoError:
    return PeerLostError(
        f"every worker must stay to the end of the run, but rank {rank} was lost {how}: look for "
        f"what ended it, or its host, and start all again; with a `directory` the run goes on from "
        f"its newest checkpoint.",
        rank=rank,
    )
