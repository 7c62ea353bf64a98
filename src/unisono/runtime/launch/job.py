"""What the workers are to run, written once by the launcher into a memfd, and their environment.

A memfd can have any size, and never fills a socket while the fork server is still loading torch.
The environment variables are those of torchrun, as far as they apply here.
"""

from __future__ import annotations

import mmap
import os
import pickle
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from unisono.runtime.launch.cell import PROGRESS_VARIABLE
from unisono.runtime.workers.memory import aligned
from unisono.runtime.workers.supervisor import COMMAND_VARIABLE, LAUNCHER_PORT_VARIABLE
from unisono.runtime.world import HOSTS_VARIABLE

SCRIPT = "script"
MODULE = "module"
FUNCTION = "function"


def fresh_seed() -> int:
    """Return 64 random bits, in a range that programs do not choose seeds from."""
    return 2**63 | int.from_bytes(os.urandom(7), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user requested; the same for every worker."""

    kind: str  # `SCRIPT`, `MODULE` or `FUNCTION`
    target: str  # the script's path, the module's name, or the function's name for messages
    argv: tuple[str, ...] = ()  # the arguments after the script or module
    payload: bytes = b""  # the pickled call; empty for scripts and modules
    buffers: tuple[Any, ...] = ()  # its large arrays and tensors, as pickle's buffers
    environ: dict[str, str]  # the launcher's environment variables
    folder: str = field(default_factory=os.getcwd)  # the working directory
    # where a function's caller imports from; empty for scripts and modules
    sys_path: tuple[str, ...] = ()
    num_workers: int  # the number of workers
    threads: int  # the number of threads per worker
    restarts: int  # how many workers may be lost within a minute
    replaces: bool  # whether a lost worker is replaced; otherwise the others continue without it
    stall_timeout_s: float  # how many seconds a worker that others wait for may make no progress
    backend: str  # what runs the program's gloo process groups: gloo or unisono
    # seeds random generators that have no state of the caller; the same on every worker
    seed: int = field(default_factory=fresh_seed)
    master_port: int = 29500  # the port of MASTER_PORT, at which nothing listens
    hosts: tuple[int, ...] = ()  # with several hosts: the number of workers of each
    host: int = 0  # the index of this host in `hosts`

    @property
    def first_rank(self) -> int:
        """The global rank of this launcher's first worker."""
        return sum(self.hosts[: self.host])

    def write(self) -> int:
        """Write the job to a new memfd and return its descriptor.

        ::

            sizes, pickled │ the job, pickled │ its buffers      each at a whole cache line
        """
        buffers: list[pickle.PickleBuffer] = []
        packed = pickle.dumps(self, 5, buffer_callback=buffers.append)
        parts = [memoryview(packed), *(buffer.raw() for buffer in buffers)]
        with os.fdopen(os.memfd_create("unisono-job", os.MFD_CLOEXEC), "wb") as file:
            pickle.dump([part.nbytes for part in parts], file)
            for part in parts:
                file.seek(aligned(file.tell()))
                file.write(part)
            file.flush()
            return os.dup(file.fileno())

    @staticmethod
    def read(fd: int) -> Job:
        """Return the job behind `fd`; processes share its buffers' memory until they write."""
        file = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE)
        sizes = pickle.load(file)
        parts, start = [], aligned(file.tell())
        for size in sizes:
            parts.append(memoryview(file)[start : start + size])
            start = aligned(start + size)
        job: Job = pickle.loads(parts[0], buffers=parts[1:])
        return job


ADDRESS = "127.0.0.1"
"""The address of the ranks of process groups."""
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    "UNISONO_THREADS",
)
# Set by an outer launcher, they would be wrong for these workers.
_NOT_TRUE_HERE = ("TORCHELASTIC_", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_PORT")
# Interfaces of gloo, tensorpipe and NCCL; without them they listen where other hosts can connect.
_LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def worker_environment(job: Job, rank: int, link_fds: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of worker `rank`; `link_fds` are the variables of its link."""
    own = {
        **{name: str(job.threads) for name in _THREAD_VARIABLES},
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(job.num_workers),
        "RANK": str(job.first_rank + rank),
        "WORLD_SIZE": str(sum(job.hosts) or job.num_workers),
        "GROUP_RANK": str(job.host),
        "GROUP_WORLD_SIZE": str(len(job.hosts) or 1),
        **link_fds,
    }
    if job.hosts:  # torchrun has set where the ranks rendezvous
        own[LAUNCHER_PORT_VARIABLE] = str(job.master_port)
        return {**job.environ, **own, HOSTS_VARIABLE: ",".join(map(str, job.hosts))}
    kept = {k: v for k, v in job.environ.items() if not k.startswith(_NOT_TRUE_HERE)}
    place = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(job.master_port)}
    return {**_LOOPBACK_ONLY, **kept, **own, **place}


def reserved_port(address: str = ADDRESS) -> socket.socket:
    """Reserve a port, which no other program gets until the socket is closed.

    Nothing listens there yet. A program of the job may listen with its own ``TCPStore``
    (``SO_REUSEADDR``). Without a network the port is 0.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with suppress(OSError):
        bound.bind((address, 0))
    return bound


def launch_environment(
    environ: Mapping[str, str],
    command: Sequence[str],
    of_gpus: Mapping[str, str] = MappingProxyType({}),
    *,
    launcher_draws: bool = False,
) -> dict[str, str]:
    """Return the environment that a job starts with: the launcher's, and the user's choices."""
    told = {name: value for name, value in environ.items() if name != PROGRESS_VARIABLE}
    draws = {PROGRESS_VARIABLE: "launcher"} if launcher_draws else {}
    return {**told, COMMAND_VARIABLE: shlex.join(command), **draws, **of_gpus}
