"""Workers that ``torchrun``, ``srun``, ``mpirun`` or your own program has started.

These launchers know nothing of what workers do together. So the first rank of each host creates the
memory that its workers share, all workers watch each other, and no worker is replaced: an error
names the lost worker, and the launcher may restart all workers.

Only the process that has taken a seat is a worker. It marks itself as one, as our launcher marks
its workers (``UNISONO_PID``). A process that it starts inherits the mark, sees that the mark names
another process, and cannot take a seat.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import final

from unisono.errors import MismatchError, RendezvousError
from unisono.runtime.procfs import NotThereError, create_memory, open_memory
from unisono.runtime.workers.control_block import MEMORY_NAME, ControlBlock, control_block_bytes
from unisono.runtime.workers.host_links import HostLinks, connect_hosts
from unisono.runtime.workers.hosts_control_block import HostsControlBlock
from unisono.runtime.workers.interfaces import address_here
from unisono.runtime.workers.job_store import num_restarts
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.rendezvous import Rendezvous
from unisono.runtime.workers.supervisor import PID_VARIABLE, Gather, Supervisor
from unisono.runtime.world import World

_MEMORY_NAME = "unisono-memory"
_SHARING = "sharing memory"


@final
class ExternallyLaunched(Supervisor):
    """The supervisor of workers that another launcher has started. Made by :meth:`meet`."""

    hears_signals = True

    def __init__(
        self, world: World, control: ControlBlock, ranks_of_host: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        self.world = world
        self.control = control
        self.incarnation = num_restarts(os.environ)
        self.ranks_of_host = ranks_of_host
        here = (ranks for ranks in ranks_of_host if world.rank in ranks)
        self._neighbours = next(here, tuple(range(world.world_size)))
        self._first = self._neighbours[0]

    @classmethod
    def meet(cls, rendezvous: Rendezvous, here: World) -> ExternallyLaunched:
        """Take this process's seat among the workers of its job. Collective, once per process."""
        places = rendezvous.places
        several = places.ranks_of_host if len(places.ranks_of_host) > 1 else ()
        address = _check_hosts(several, here) if several else ""
        links = connect_hosts(rendezvous, address) if several else None
        control = _seated(rendezvous, links)
        os.environ[PID_VARIABLE] = str(os.getpid())
        _report_end(control, here.rank)
        supervisor = cls(here, control, several)
        supervisor.address = address
        return supervisor

    def poll(self) -> None:
        """Mark workers that died without reporting it."""
        for rank in self._neighbours:
            line = self.control.lines[rank]
            # A worker that leaves reports it before its process ends, so check for the end first.
            if rank != self.world.rank and line.has_died and line.departure == Departure.PRESENT:
                self.control.leave(rank, Departure.DIED)
        self.control.receive()

    def memory_fd(self, key: int, num_bytes: int, gather: Gather) -> int:
        """Share memory that each host's first rank creates. Collective: every rank calls it."""
        is_first = self.world.rank == self._first
        fd = create_memory(_MEMORY_NAME, num_bytes) if is_first else -1
        heard = gather(json.dumps([key, num_bytes, os.getpid(), fd]).encode(), _SHARING)
        said = {rank: json.loads(message) for rank, message in heard.items()}
        _check_alike(said)
        _, _, its_pid, its_fd = said[self._first]
        if not is_first:
            fd = _open(its_pid, its_fd, _MEMORY_NAME, num_bytes)
        gather(b"", _SHARING)
        return fd


def _check_hosts(ranks_of_host: tuple[tuple[int, ...], ...], here: World) -> str:
    """Check that ranks are spread over hosts as declared; return this host's address."""
    for ranks in ranks_of_host:
        if ranks[-1] - ranks[0] >= len(ranks):
            raise RendezvousError(
                f"ranks on one host must be neighbours, but those of one are {ranks}: have them "
                f"counted host by host (`srun --distribution=block`, `mpirun --map-by core`)."
            )
    if here.local_world_size == here.world_size:
        raise RendezvousError(
            f"all workers must be on one host and in one container, as LOCAL_WORLD_SIZE says, but "
            f"ranks {' and '.join(map(str, ranks_of_host))} are not: start them in the "
            f"same container, or set LOCAL_RANK and LOCAL_WORLD_SIZE in each process."
        )
    return address_here()


def _seated(rendezvous: Rendezvous, links: HostLinks | None) -> ControlBlock:
    """Share the control block of each host's first rank. Collective: every rank calls it."""
    places = rendezvous.places
    num_bytes, first = control_block_bytes(len(places.local_ranks)), places.local_ranks[0]
    fd = create_memory(MEMORY_NAME, num_bytes) if places.rank == first else -1
    its_pid, its_fd = rendezvous.gather("unisono.Trainer", [os.getpid(), fd])[first]
    if places.rank != first:
        fd = _open(its_pid, its_fd, MEMORY_NAME, num_bytes)
    control: ControlBlock
    if links is None:
        control = ControlBlock(fd, places.world_size)
    else:
        control = among_hosts = HostsControlBlock(fd, places)
        among_hosts.connect(links)
    control.take_seat(places.rank)
    # Once all have mapped it, the descriptor is no longer needed.
    rendezvous.gather("unisono.Trainer", None)
    control.close()
    return control


def _report_end(control: ControlBlock, rank: int) -> None:
    """Report the end of this process to the others; they detect a killed process themselves."""
    pid = os.getpid()
    call_before = sys.excepthook

    def leave(how: Departure) -> None:
        # Not in a forked child, which inherits these hooks.
        if os.getpid() == pid and control.departure(rank) == Departure.PRESENT:
            control.leave(rank, how)

    def note_failure(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        leave(Departure.FAILED)
        call_before(kind, error, traceback)

    sys.excepthook = note_failure
    atexit.register(leave, Departure.FINISHED)


def _open(pid: int, fd: int, name: str, num_bytes: int) -> int:
    try:
        return open_memory(pid, fd, name, num_bytes)
    except NotThereError as error:
        raise RendezvousError(
            f"all workers must share the memory that rank 0 has made, but {error}: start them as "
            f"one user, in one container, and let rank 0 live as long as the others."
        ) from error


def _check_alike(said: Mapping[int, list[int]]) -> None:
    for rank, (key, num_bytes, *_) in said.items():
        if [key, num_bytes] != said[0][:2]:
            raise MismatchError(
                f"all workers must share memory of the same size in the same order, but request "
                f"{said[0][0]} of rank 0 is for {said[0][1]} bytes and request {key} of rank "
                f"{rank} for {num_bytes}: build the same model on every worker."
            )
