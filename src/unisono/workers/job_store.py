"""Where is the store through which the workers of a job find each other?

A file without a name (memfd) is torch's ``FileStore`` wherever all workers are on one host: nothing
listens, nothing is left over, and each process opens it through /proc. Workers of our launcher are
given its descriptor. For those of another one rank 0 makes it, and announces it in the private
folder until all have come::

    rank 0   makes the file ─ announces it ──────── … ─ all have come ─ removes the announcement
    rank 1     reads the announcement ─ opens the file through /proc ─ …

An announcement may be left over from an earlier job of the same name. Then nobody holds it, or this
rank has come there before; the worker keeps looking for a limited time.

Across hosts the store is torch's ``TCPStore`` at MASTER_ADDR and MASTER_PORT: torchrun's agent has
it, or else rank 0, which listens at that address alone.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from unisono.errors import RendezvousError
from unisono.notices import say
from unisono.timeouts import NOTICE
from unisono.workers import codec
from unisono.workers.gathering import too_late
from unisono.workers.jobname import JobName
from unisono.workers.private import PrivateFolder, Word
from unisono.workers.proc import NotThereError, host_name, open_memory, started_at
from unisono.world import OPEN_MPI, SLURM, World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEMORY_NAME = "unisono-store"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOOK_EVERY_S = 0.01
_TAKEN_AT_MOST_S = 3.0
_CONNECTS_WITHIN_S = 2.0
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where rank 0 has the store, as it announces it."""

    pid: int
    fd: int
    host: str


def is_at_master(environ: Mapping[str, str], here: World) -> bool:
    """Tell whether the store is at MASTER_ADDR and MASTER_PORT; otherwise it is a file.

    It is there where an agent of torchrun has it, and where workers may be on several hosts.

    Raises:
        ValueError: they are on several hosts, and nothing says where rank 0 is.
    """
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
    several = here.local_world_size != here.world_size
    if len(given) == 1 and (several or here.started_by not in (SLURM, OPEN_MPI)):
        raise ValueError(
            f"`MASTER_ADDR` and `MASTER_PORT` must be set together, but only {given[0]} is: set "
            f"both, or, where all workers are on one host, none."
        )
    if not given and several:
        raise ValueError(
            f"`MASTER_ADDR` and `MASTER_PORT` must say where rank 0 is where workers are on "
            f"several hosts ({here.local_world_size} of {here.world_size} on this one), but are "
            f"not set: set both in every process."
        )
    if len(given) < 2:
        return False
    is_counted = here.started_by in (SLURM, OPEN_MPI) or "LOCAL_WORLD_SIZE" in environ
    is_here = environ["MASTER_ADDR"] in _LOOPBACK or is_counted
    return several or not is_here or has_agent(environ)


def has_agent(environ: Mapping[str, str]) -> bool:
    """Tell whether an agent of torchrun holds a store that outlives the workers."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def file_store(fd: int) -> Store:
    """Open the store in a memfd, which must stay open as `fd`."""
    from torch._C._distributed_c10d import FileStore

    store: Store = FileStore(f"/proc/self/fd/{fd}", -1)
    return store


@contextlib.contextmanager
def announced_store(
    job: JobName, here: World, folder: PrivateFolder, *, where: str, advice: str, timeout_s: float
) -> Iterator[Store]:
    """Have the file of rank 0. Others can find it until the block of rank 0 ends.

    Args:
        job: the job's name.
        here: this worker's place.
        folder: where rank 0 announces it.
        where: what the workers come to, for messages.
        advice: what to do about one that did not come.
        timeout_s: how long rank 0 may take, in seconds.

    Raises:
        RendezvousError: another process has come as this rank, or rank 0 cannot be reached.
        WaitTimeoutError: rank 0 did not come in time.
    """
    if here.rank:
        yield _find(job, here, folder, where, advice, timeout_s)
        return
    # Stays open as long as the process: whoever makes a process group later looks here, too.
    fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
    address = StoreAddress(os.getpid(), fd, host_name())
    held = folder.leave(job.name, codec.encode(address))
    if held is None:
        os.close(fd)
        raise _taken(job, here)
    try:
        yield file_store(fd)
    finally:
        folder.take_back(job.name, held)


def _find(
    job: JobName, here: World, folder: PrivateFolder, where: str, advice: str, timeout_s: float
) -> Store:
    begun_s = time.monotonic()
    taken_s, is_told = math.inf, False
    while True:
        try:
            store = _open(folder.read(job.name), here.rank)
            if store is not None:
                return store
            taken_s = min(taken_s, time.monotonic())
            if time.monotonic() - taken_s >= _TAKEN_AT_MOST_S:
                raise _taken(job, here)
            reason = f"somebody has come as rank {here.rank} to where it is"
        except NotThereError as error:
            reason = str(error)
        waited_s = time.monotonic() - begun_s
        if waited_s >= timeout_s:
            raise too_late(here.world_size, where, timeout_s, (0,), f"{reason}; {advice}")
        if waited_s >= NOTICE.in_s() and not is_told:
            is_told = True
            say(f"rank {here.rank} has waited {waited_s:.0f} s in {where} for rank 0.")
        time.sleep(_LOOK_EVERY_S)


def _open(word: Word | None, rank: int) -> Store | None:
    """Come as a rank to the store to which an announcement leads; None if somebody else has.

    Raises:
        NotThereError: it leads nowhere.
        RendezvousError: it leads to where this process cannot go.
    """
    if word is None or not word.is_held:
        raise NotThereError("rank 0 has announced nothing")
    try:
        address = codec.decode(StoreAddress, word.text)
    except ValueError as error:
        raise NotThereError(str(error)) from error
    if address.host != host_name():
        raise RendezvousError(
            f"all workers of a job must be on one host and in one container, or MASTER_ADDR and "
            f"MASTER_PORT must say where rank 0 is, but rank 0 is in another one than rank {rank}: "
            f"set both in every process, and LOCAL_RANK and LOCAL_WORLD_SIZE."
        )
    fd = open_memory(address.pid, address.fd, MEMORY_NAME)
    store = file_store(fd)
    if store.add(f"comings of {rank}", 1) == 1:
        store.set(f"process of {rank}", f"{os.getpid()} {started_at(os.getpid())}")
        return store
    is_gone = store.check([f"process of {rank}"])
    if is_gone:
        pid, started = store.get(f"process of {rank}").decode().split()
        is_gone = str(started_at(int(pid))) != started
    os.close(fd)
    if is_gone:
        raise NotThereError(f"an earlier rank {rank} has died there")
    return None


def _taken(job: JobName, here: World) -> RendezvousError:
    return RendezvousError(
        f"each worker of a job must have a rank of its own, but another process has come as rank "
        f"{here.rank} of {here.world_size} ({job.told}): give every process its own RANK, and jobs "
        f"that run at the same time another MASTER_PORT; what a worker starts must not train in "
        f"its place."
    )


def store_at_master(
    environ: Mapping[str, str], here: World, *, where: str, timeout_s: float
) -> Store:
    """Have the store at MASTER_ADDR and MASTER_PORT.

    Raises:
        RendezvousError: rank 0 cannot listen there.
        WaitTimeoutError: nobody listens there in time.
    """
    from torch._C._distributed_c10d import TCPStore

    address, port = environ["MASTER_ADDR"], _port(environ["MASTER_PORT"])
    limit = timedelta(seconds=timeout_s)
    if here.rank or has_agent(environ):
        _await_master(address, port, here, where, timeout_s)
        return TCPStore(address, port, None, False, limit, wait_for_workers=False)
    try:
        fd = _listen(address, port)
    except OSError as error:
        # The program itself may have made a process group there; torch then shares its store.
        if error.errno != errno.EADDRINUSE:
            raise RendezvousError(
                f"rank 0 must listen at MASTER_ADDR and MASTER_PORT ({address}:{port}), but that "
                f"fails with: {error}. Set both to an address of rank 0's host and a free port."
            ) from error
        fd = None
    try:
        return TCPStore(
            *(address, port, None, True, limit),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=fd,
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"MASTER_PORT ({port}) must be free on rank 0's host, but another process listens "
            f"there ({error}): set it to another one."
        ) from error


def _port(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**16:
        return int(text)
    raise ValueError(f"`MASTER_PORT` must be a number of a port, but is {text!r}: set it to one.")


def _listen(address: str, port: int) -> int:
    """Listen at that address alone; torch's own way is to listen at all of them."""
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with contextlib.closing(socket.socket(family, kind)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(_BACKLOG)
        return listening.detach()


def _await_master(address: str, port: int, here: World, where: str, timeout_s: float) -> None:
    def tell(waited_s: float) -> None:
        say(f"rank {here.rank} has waited {waited_s:.0f} s in {where} for rank 0.")

    error = await_listener(address, port, timeout_s, tell)
    if error is not None:
        advice = (
            f"{address}:{port} cannot be reached ({error}); look whether it was started, "
            f"and whether MASTER_ADDR and MASTER_PORT name it."
        )
        raise too_late(here.world_size, where, timeout_s, (0,), advice) from error


def await_listener(
    address: str, port: int, timeout_s: float, tell: Callable[[float], None]
) -> OSError | None:
    """Wait until somebody listens there: inside of torch's store no signal would be heard.

    Args:
        address: where.
        port: where.
        timeout_s: how long, in seconds.
        tell: told once how long it has waited, if that is long.

    Returns:
        Why nobody was reached in time; None if somebody was.
    """
    begun_s = time.monotonic()
    is_told = False
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECTS_WITHIN_S).close()
            return None
        except OSError as error:
            waited_s = time.monotonic() - begun_s
            if waited_s >= timeout_s:
                return error
            if waited_s >= NOTICE.in_s() and not is_told:
                is_told = True
                tell(waited_s)
        time.sleep(_LOOK_EVERY_S)
