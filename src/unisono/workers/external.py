"""The host of workers that nobody of ours launched, but that have found each other.

``torchrun``, ``srun`` and ``mpirun`` start workers and know nothing of what they do together. So
rank 0 makes the memory that all share, everybody watches over the others, and nobody makes up for
one that is lost: what is lost is told by name, and whoever has started the workers may start them
again.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.errors import MismatchError, RendezvousError
from unisono.workers.control_block import ControlBlock, Departure
from unisono.workers.host_rendezvous import TIMEOUT_S, HostRendezvous
from unisono.workers.jobname import job_name
from unisono.workers.launcher_link import PID_VARIABLE, is_worker
from unisono.workers.membership import Membership
from unisono.workers.memory import Memory
from unisono.workers.private import PrivateFolder
from unisono.workers.proc import NotThereError, open_memory
from unisono.workers.process_watch import ProcessWatch
from unisono.workers.supervisor import Live, Passed
from unisono.world import World

TIMEOUT_VARIABLE = "UNISONO_MEETING_TIMEOUT"
_MEMORY_NAME = "unisono-memory"
_SHARING = "sharing memory"

Gather = Callable[[bytes, str], dict[int, bytes]]


class ExternallyLaunched:
    """A :class:`unisono.workers.supervisor.Supervisor` for those who have found each other. Final.

    Args:
        rank: this worker.
        gather: tells everybody something and hears theirs, as
            :meth:`unisono.workers.team.Team.gather`.
    """

    can_replace = False

    def __init__(self, rank: int, gather: Gather) -> None:
        self._rank, self._gather = rank, gather

    def note_ready(self) -> None:
        """Nobody will replace this process."""

    def memory(self, key: int, num_bytes: int) -> Memory:
        """Share memory that rank 0 makes. Collective: every rank calls it.

        Raises:
            MismatchError: another worker asked for another size.
            RendezvousError: rank 0's memory cannot be opened from here.
        """
        fd = _make(num_bytes) if self._rank == 0 else -1
        try:
            mine = {"key": key, "num_bytes": num_bytes, "pid": os.getpid(), "fd": fd}
            heard = self._gather(json.dumps(mine).encode(), _SHARING)
            said = {rank: json.loads(message) for rank, message in heard.items()}
            _check_alike(said)
            if self._rank:
                fd = _open(said[0]["pid"], said[0]["fd"], num_bytes)
            memory = Memory.map(fd, num_bytes)
            self._gather(b"", _SHARING)
        finally:
            if fd >= 0:
                os.close(fd)
        return memory

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """Nobody is made up for, and nobody joins."""
        raise AssertionError(
            "workers that found each other never stop for a change of the membership"
        )

    def entry(self, index: int, name: str) -> Passed | Live:
        """Nobody replaces a process that nobody of ours launched."""
        raise AssertionError("workers that found each other have no replacements")

    def note_result(self, index: int, name: str, payload: bytes) -> None:
        """Nobody will ask."""

    def note_loop(self, index: int, facts: dict[str, Any]) -> None:
        """Nobody will join."""

    def note_end_of_loop(self, index: int, payload: bytes) -> None:
        """Nobody will ask."""

    def give_up_recovery(self, reason: str) -> None:
        """There is none."""

    def remove_at_end(self, path: Path) -> None:
        """Nobody outlives the workers to do it."""

    def leave(self, path: Path) -> None:
        """Nobody would have removed it."""


def refuse_strangers(here: World, environ: Mapping[str, str] | None = None) -> None:
    """Refuse those that cannot take a seat: children of workers, and workers of several hosts.

    Raises:
        RuntimeError: this process is one of these; the message says which.
    """
    environ = os.environ if environ is None else environ
    if PID_VARIABLE in environ and not is_worker(environ):
        raise RuntimeError(
            f"what a worker starts must not train in its place, but this process has the variables "
            f"of rank {here.rank} of {here.world_size} and is another one than that worker "
            f"(process {environ[PID_VARIABLE]}): train in the worker itself; for a training of its "
            f"own, start it without {PID_VARIABLE}, RANK and WORLD_SIZE."
        )
    if here.local_world_size != here.world_size:
        raise RuntimeError(
            f"all workers must be on one host, but of {here.world_size} that {here.started_by} has "
            f"started {here.local_world_size} are on this one: several hosts are not supported "
            f"yet; start all of them on one."
        )


def refuse_larger_group(here: World) -> None:
    """Refuse one of a process group with others who would not take part.

    Raises:
        ValueError: torch's process group has more ranks than there are workers.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > here.world_size:
        raise ValueError(
            f"every rank of torch's process group must be one of the workers that train together, "
            f"but the group has {world_size} (this process is rank {rank}) where RANK and "
            f"WORLD_SIZE tell of {here.world_size}: set "
            f'`os.environ["RANK"] = "{rank}"` and `os.environ["WORLD_SIZE"] = "{world_size}"`, in '
            f"each process its own rank, or start the program with `unisono run -n {world_size}` "
            f"instead of `mp.spawn`."
        )


def meet_others(here: World) -> tuple[ControlBlock, ProcessWatch]:
    """Take this process's seat among the workers of its job. Collective: every rank calls it once.

    From then on the others learn how this process ends.

    Raises:
        RendezvousError: the seat is taken, or the others cannot be reached from here.
        WaitTimeoutError: somebody did not come in time.
        PeerLostError: somebody came and left before all were there.
    """
    job = job_name(os.environ, here, session=os.getsid(0))
    folder = PrivateFolder.open()
    try:
        control, watch = HostRendezvous(job, here, folder, timeout_s=_timeout_s(os.environ)).enter()
    finally:
        folder.close()
    os.environ[PID_VARIABLE] = str(os.getpid())
    _tell_the_end(control, here.rank)
    return control, watch


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


def _make(num_bytes: int) -> int:
    fd = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
    try:
        # Sparse: pages exist from when they are first written.
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open(pid: int, fd: int, num_bytes: int) -> int:
    try:
        return open_memory(pid, fd, _MEMORY_NAME, num_bytes)
    except NotThereError as error:
        raise RendezvousError(
            f"all workers must share the memory that rank 0 has made, but {error}: start them as "
            f"one user, in one container, and let rank 0 live as long as the others."
        ) from error


def _check_alike(said: Mapping[int, Mapping[str, Any]]) -> None:
    first = said[0]
    for rank, theirs in said.items():
        for name in ("key", "num_bytes"):
            if theirs[name] != first[name]:
                raise MismatchError(
                    f"all workers must share memory of the same size in the same order, but "
                    f"request {first['key']} of rank 0 is for {first['num_bytes']} bytes and "
                    f"request {theirs['key']} of rank {rank} for {theirs['num_bytes']}: build the "
                    f"same model on every worker."
                )
