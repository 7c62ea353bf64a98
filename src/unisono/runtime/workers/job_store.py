"""Where is the store through which the workers of a job find each other?

If all workers are on one host, the store is torch's ``FileStore`` on an unnamed file (memfd):
nothing listens, nothing is left over, and each process opens it through /proc. Our launcher passes
the descriptor to its workers. Under another launcher rank 0 creates the file and, until all have
arrived, a second, empty one with the job's name. The others search this user's open files for it::

    rank 0   creates both ──────────────────────────── … ─ all have come ─ closes the second
    rank 1     finds the second ─ opens the first ─── …

Across hosts the store is torch's ``TCPStore`` at MASTER_ADDR and MASTER_PORT: torchrun's agent
hosts it, or else rank 0, which listens only at that address. If the variables are not set, tasks of
Slurm rendezvous on the first node of their step, and those of Open MPI where its `mpirun` runs.

A job's name is the same for all its workers, and differs from that of every other job on this host,
including an earlier attempt of the same job.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from unisono.errors import RendezvousError
from unisono.runtime.notices import say
from unisono.runtime.procfs import NotThereError, memories_of, open_memory, started_at, wait_for
from unisono.runtime.workers.gathering import too_late
from unisono.runtime.workers.interfaces import (
    INTERFACE_VARIABLE,
    address_here,
    address_towards,
    is_loopback,
)
from unisono.runtime.world import OPEN_MPI, SLURM, SOMEBODY, TORCHRUN, World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


MEMORY_NAME = "unisono-store"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TAKEN_AT_MOST_S = 3.0
_CONNECTS_WITHIN_S = 2.0
_BACKLOG = 1024
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000

T = TypeVar("T")


def is_at_master(environ: Mapping[str, str], here: World) -> bool:
    """Return whether the store is at MASTER_ADDR and MASTER_PORT; otherwise it is a file."""
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
    several = here.local_world_size != here.world_size
    if len(given) == 1 and (several or here.started_by not in (SLURM, OPEN_MPI)):
        raise ValueError(
            f"`MASTER_ADDR` and `MASTER_PORT` must be set together, but only {given[0]} is: set "
            f"both, or neither if all workers are on one host."
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


def place_among_tasks(environ: Mapping[str, str], started_by: str) -> tuple[str, int] | None:
    """Return where the tasks of a cluster can rendezvous; None if its variables do not say.

    The port is below the kernel's ephemeral ports, and differs for each job and step.
    """
    if started_by not in (SLURM, OPEN_MPI):
        return None
    is_slurm = started_by == SLURM
    host = _first_of_slurm(environ) if is_slurm else _host_of_mpirun(environ)
    step = repr([environ.get(name) for name in (_SLURM[:2] if is_slurm else _OPEN_MPI)])
    return None if host is None else (host, _FIRST_PORT + zlib.crc32(step.encode()) % _NUM_PORTS)


def _first_of_slurm(environ: Mapping[str, str]) -> str | None:
    first = re.match(r"([^, []|\[[^]]*\])+", environ.get("SLURM_STEP_NODELIST", ""))
    has_other_order = environ.get("SLURM_DISTRIBUTION") == "arbitrary"
    if first is None or has_other_order or "SLURM_HET_SIZE" in environ:  # a list per component
        return None
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])  # "n[01-03,7]" begins with n01


def _host_of_mpirun(environ: Mapping[str, str]) -> str | None:
    """Return the address of `mpirun`, on whose host rank 0 is unless it runs on others alone."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # "1.0;tcp://10.0.0.1,10.1.0.1:4000;tcp6://…"
    found = re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri)
    return None if found is None else found[1] or found[2]


def set_master(environ: MutableMapping[str, str], here: World) -> None:
    """Set MASTER_ADDR and MASTER_PORT for tasks on several nodes, unless they are set."""
    several = here.local_world_size != here.world_size
    place = place_among_tasks(environ, here.started_by) if several else None
    if place is not None and not any(map(environ.get, _MASTER)):
        environ.update(zip(_MASTER, map(str, place), strict=True))


def has_agent(environ: Mapping[str, str]) -> bool:
    """Return whether an agent of torchrun holds a store that outlives the workers."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def file_store(fd: int) -> Store:
    """Open the store in a memfd, which must stay open as `fd`."""
    from torch._C._distributed_c10d import FileStore

    store: Store = FileStore(f"/proc/self/fd/{fd}", -1)
    return store


def wait_for_rank_0(
    look: Callable[[float], T], here: World, where: str, advice: str, timeout_s: float
) -> T:
    """Call `look` until rank 0 is found, as long as it raises a :class:`NotThereError`."""

    def late(error: NotThereError) -> Exception:
        return too_late(here.world_size, where, timeout_s, (0,), f"{error}; {advice}")

    return wait_for(look, timeout_s, late, (f"rank {here.rank}", f"in {where} for rank 0"))


@contextlib.contextmanager
def store_of_rank_0(job: JobName, here: World) -> Iterator[Store]:
    """Create the job's file, as rank 0. The others can find it until the block ends."""
    # Stays open as long as the process: later process groups use it as well.
    fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
    announced = os.memfd_create(f"{_announcement(job)}{os.getpid()}-{fd}", os.MFD_CLOEXEC)
    try:
        if announcements(job)[0][0] != os.getpid():
            os.close(fd)
            raise _taken(job, here)
        yield file_store(fd)
    finally:
        os.close(announced)


def store_there(job: JobName, here: World, waited_s: float) -> Store:
    """Open the file that rank 0 created, as another rank, or raise a :class:`NotThereError`."""
    found = announcements(job)
    if not found:
        raise NotThereError("rank 0 is not there")
    pid, number = found[0]
    fd = open_memory(pid, number, MEMORY_NAME)
    store = file_store(fd)
    told = f"process of {here.rank}"
    if store.add(f"comings of {here.rank}", 1) == 1:
        store.set(told, f"{os.getpid()} {started_at(os.getpid())}")
        return store
    process = store.get(told).decode().split() if store.check([told]) else []
    del store  # its destructor accesses its file once more
    os.close(fd)
    if process and str(started_at(int(process[0]))) != process[1]:
        raise NotThereError(f"an earlier rank {here.rank} has died there")
    # An earlier job of this name may still be there for a moment.
    if waited_s >= _TAKEN_AT_MOST_S:
        raise _taken(job, here)
    raise NotThereError(f"somebody has come as rank {here.rank} to where it is")


def announcements(job: JobName) -> list[tuple[int, int]]:
    """Return the processes that announce themselves as rank 0 of a job, and their descriptors.

    The oldest announcement is first.
    """
    found = [
        (facts.st_ctime_ns, pid, int(name.rpartition("-")[2]))
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        # Not one that a fork has inherited.
        for _, name, facts in memories_of(pid, f"{_announcement(job)}{pid}-")
        if facts.st_uid == os.geteuid()
    ]
    return [(pid, number) for _, pid, number in sorted(found)]


def _announcement(job: JobName) -> str:
    return f"unisono-{job.name}-"


def _taken(job: JobName, here: World) -> RendezvousError:
    return RendezvousError(
        f"each worker of a job must have its own rank, but another process has joined as rank "
        f"{here.rank} of {here.world_size} ({job.told}): give every process its own RANK, and jobs "
        f"that run at the same time different MASTER_PORTs; a process that a worker starts must "
        f"not train in its place."
    )


def store_at_master(
    environ: Mapping[str, str], here: World, where: str, timeout_s: float, advice: str
) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT; rank 0 creates it."""
    from torch._C._distributed_c10d import TCPStore

    address, port = environ["MASTER_ADDR"], _port(environ["MASTER_PORT"])
    limit = timedelta(seconds=timeout_s)
    if here.rank or has_agent(environ):
        wait_for_rank_0(lambda _: knock(address, port), here, where, advice, timeout_s)
        return TCPStore(address, port, None, False, limit, wait_for_workers=False)
    try:
        address = _address_of_rank_0(address, here, environ)
        return TCPStore(
            *(address, port, None, True, limit),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listening_fd(address, port),
        )
    except (OSError, RuntimeError) as error:
        raise RendezvousError(
            f"rank 0 must listen at MASTER_ADDR and MASTER_PORT ({address}:{port}), but that fails "
            f"with: {error}. Set both to an address of rank 0's host and a free port."
        ) from error


def _address_of_rank_0(address: str, here: World, environ: Mapping[str, str]) -> str:
    """Return where rank 0 listens: on Debian a host resolves its own name to 127.0.1.1."""
    if here.local_world_size == here.world_size or not is_loopback(address_towards(address)):
        return address
    if environ.get(INTERFACE_VARIABLE):
        return address_here(environ)
    say(
        f"rank 0 listens at {address}, which is a loopback address on its own host: where workers "
        f"of other hosts do not reach it, name the interface to them in {INTERFACE_VARIABLE}."
    )
    return address


def _listening_fd(address: str, port: int) -> int | None:
    """Listen there; None if a group of this process may have the port and serves the store."""
    try:
        return listen(address, port).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _port(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**16:
        return int(text)
    raise ValueError(f"`MASTER_PORT` must be a number of a port, but is {text!r}: set it to one.")


def listen(address: str, port: int) -> socket.socket:
    """Listen only at that address; torch would listen at all addresses."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family, backlog=_BACKLOG)


def knock(address: str, port: int) -> None:
    """Check that the port is open: a wait inside of torch's store would not handle signals."""
    try:
        socket.create_connection((address, port), timeout=_CONNECTS_WITHIN_S).close()
    except OSError as error:
        raise NotThereError(f"{address}:{port} cannot be reached ({error})") from error


_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_OPEN_MPI = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
_TORCHRUN = ("TORCHELASTIC_RUN_ID", *_MASTER, "TORCHELASTIC_RESTART_COUNT")
# Variables to look at in order; the first group with any set counts.
_KINDS = {
    TORCHRUN: (_TORCHRUN,),
    SLURM: (_SLURM, _MASTER),
    OPEN_MPI: (_OPEN_MPI, _MASTER, _SLURM),
    SOMEBODY: (_MASTER, _SLURM, _OPEN_MPI),
}


@dataclass(frozen=True, slots=True)
class JobName:
    """A job's name among all of one user on one host."""

    name: str  # usable as a file name
    told: str  # what it was derived from, for messages


def job_name(environ: Mapping[str, str], here: World, *, session: int) -> JobName:
    """Return the name of the job in `environ`, or one made of the session if nothing is set."""
    for names in _KINDS.get(here.started_by, _KINDS[SOMEBODY]):
        facts = [(name, environ[name]) for name in names if name in environ]
        if facts:
            break
    else:
        facts = [("session", str(session))]
    told = ", ".join(f"{name}={value}" for name, value in facts)
    whole = repr((here.started_by, here.world_size, facts))
    return JobName(f"job-{hashlib.sha256(whole.encode()).hexdigest()[:32]}", told)


def num_restarts(environ: Mapping[str, str]) -> int:
    """Return how often this job's launcher has restarted it."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        text = environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return 0
