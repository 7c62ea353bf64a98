"""Workers that ``torchrun``, ``srun``, ``mpirun`` or a program of yours has started.

These launchers know nothing of what workers do together. So rank 0 makes the memory that all share,
everybody watches over the others, and nobody is replaced: a lost worker is named in an error, and
whoever has started the workers may start them again.

Only the process that has taken a seat is a worker. It marks itself as one, as our launcher marks
its own (``UNISONO_PID``); what it starts inherits the mark, sees that another process is meant, and
is refused a seat.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from types import TracebackType

from unisono.errors import MismatchError, RendezvousError
from unisono.workers.control_block import (
    MEMORY_NAME,
    ControlBlock,
    Departure,
    control_block_bytes,
)
from unisono.workers.host_links import connect_hosts
from unisono.workers.host_rendezvous import TIMEOUT_S, HostRendezvous
from unisono.workers.hosts_control_block import HostsControlBlock
from unisono.workers.interfaces import address_here
from unisono.workers.jobname import job_name, num_restarts
from unisono.workers.launcher_link import PID_VARIABLE
from unisono.workers.memory import Memory
from unisono.workers.private import PrivateFolder
from unisono.workers.proc import NotThereError, create_memory, open_memory
from unisono.workers.process_watch import ProcessWatch
from unisono.workers.supervisor import Gather, Supervisor
from unisono.world import World

TIMEOUT_VARIABLE = "UNISONO_MEETING_TIMEOUT"
_MEMORY_NAME = "unisono-memory"
_SHARING = "sharing memory"


class ExternallyLaunched(Supervisor):
    """What workers of another launcher do for each other. Final; made by :meth:`meet`."""

    def __init__(self, world: World, control: ControlBlock, watch: ProcessWatch) -> None:
        self.world = world
        self.control = control
        self.incarnation = num_restarts(os.environ)
        self._watch = watch

    @classmethod
    def meet(cls, here: World) -> ExternallyLaunched:
        """Take this process's seat among the workers of its job. Collective, once in a process.

        From then on the others learn how this process ends.

        Raises:
            RendezvousError: the seat is taken, or the others cannot be reached from here.
            WaitTimeoutError: somebody did not come in time.
            PeerLostError: somebody came and left before all were there.
        """
        if here.local_world_size != here.world_size:
            return cls._meet_hosts(here)
        job = job_name(os.environ, here, session=os.getsid(0))
        timeout_s = _timeout_s(os.environ)
        folder = PrivateFolder.open()
        try:
            control, watch = HostRendezvous(job, here, folder, timeout_s=timeout_s).enter()
        finally:
            folder.close()
        os.environ[PID_VARIABLE] = str(os.getpid())
        _tell_the_end(control, here.rank)
        return cls(here, control, watch)

    @classmethod
    def _meet_hosts(cls, here: World) -> ExternallyLaunched:
        """Take this process's seat, where workers are on several hosts; see :meth:`meet`."""
        from unisono.workers.interim_rendezvous import InterimRendezvous

        rendezvous = InterimRendezvous(here)
        places, timeout_s = rendezvous.places, _timeout_s(os.environ)
        address = address_here()
        links = connect_hosts(rendezvous, address, timeout_s)
        ranks = places.ranks_of_host[places.host]
        size = control_block_bytes(here.world_size)
        is_first = here.rank == ranks[0]
        fd = create_memory(MEMORY_NAME, size) if is_first else -1
        pid, its_fd = rendezvous.gather("control blocks", [os.getpid(), fd])[ranks[0]]
        fd = fd if is_first else _open(pid, its_fd, size, MEMORY_NAME)
        control = HostsControlBlock(fd, places, links)
        control.take_seat(here.rank)
        rendezvous.gather("seats", True)
        control.close()
        os.environ[PID_VARIABLE] = str(os.getpid())
        _tell_the_end(control, here.rank)
        supervisor = cls(here, control, ProcessWatch(control, here.rank, ranks))
        supervisor.ranks_of_host, supervisor.address = places.ranks_of_host, address
        return supervisor

    def look(self) -> None:
        """Mark who has died without a word."""
        self._watch.look()
        if isinstance(self.control, HostsControlBlock):
            self.control.receive()

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        """Share memory that the first rank of a host makes. Collective: every rank calls it.

        Raises:
            MismatchError: another worker asked for another size.
            RendezvousError: that memory cannot be opened from here.
        """
        rank = self.world.rank
        first = next((ranks[0] for ranks in self.ranks_of_host if rank in ranks), 0)
        fd = create_memory(_MEMORY_NAME, num_bytes) if rank == first else -1
        try:
            heard = gather(json.dumps([key, num_bytes, os.getpid(), fd]).encode(), _SHARING)
            said = {rank: json.loads(message) for rank, message in heard.items()}
            _check_alike(said)
            _, _, pid_of_first, fd_of_first = said[first]
            if rank != first:
                fd = _open(pid_of_first, fd_of_first, num_bytes)
            memory = Memory.map(fd, num_bytes)
            gather(b"", _SHARING)
        finally:
            if fd >= 0:
                os.close(fd)
        return memory


def _tell_the_end(control: ControlBlock, rank: int) -> None:
    """Have the end of this process told to those who may wait for it.

    A process that is killed cannot tell; its death is seen.
    """
    pid = os.getpid()
    call_before = sys.excepthook

    def leave(how: Departure) -> None:
        # Not in a child that was forked, which inherits all this.
        if os.getpid() == pid and control.departure(rank) == Departure.PRESENT:
            control.leave(rank, how)

    def note_failure(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        leave(Departure.FAILED)
        call_before(kind, error, traceback)

    sys.excepthook = note_failure
    atexit.register(leave, Departure.FINISHED)


def _timeout_s(environ: Mapping[str, str]) -> float:
    text = environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return TIMEOUT_S
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ValueError(
        f"`{TIMEOUT_VARIABLE}` must be a number of seconds above 0, but is {text!r}: unset it."
    )


def _open(pid: int, fd: int, num_bytes: int, name: str = _MEMORY_NAME) -> int:
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
