"""What are the workers to do? One description, written once by the launcher, read by each worker.

It is in a memfd, so it may be of any size, needs no file, and never fills a socket while the fork
server is still loading torch. Its first line is JSON; what follows is the pickled call.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.seeding import fresh_seed

SCRIPT = "script"
MODULE = "module"
FUNCTION = "function"


def working_folder() -> str:
    """Return the working directory.

    Raises:
        FileNotFoundError: it has been removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "the working folder must be there, but is not: change to one that is, with `os.chdir`."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user asks for; the same for every worker."""

    kind: str  # `SCRIPT`, `MODULE` or `FUNCTION`
    target: str  # the script's path, the module's name, or the function's name for messages
    argv: tuple[str, ...] = ()  # what follows the script or module on the command line
    payload: bytes = b""  # the pickled call; empty for scripts and modules
    environ: dict[str, str]  # the launcher's environment variables
    folder: str = field(default_factory=working_folder)  # the working directory
    # where the caller of a function imports from; empty for scripts and modules
    sys_path: tuple[str, ...] = ()
    num_workers: int  # how many workers there are
    num_gpus: int = 0  # how many GPUs they see, as far as they are told
    on_cpu: str = ""  # what to tell the user if workers that see GPUs compute on the CPU; or empty
    threads: int  # how many threads each of them computes with
    restarts: int  # how many workers may be lost within a minute
    replaces: bool  # whether a lost worker is replaced; otherwise the others continue without it
    stall_timeout_s: float  # how long a worker that others wait for may stand still, in seconds
    backend: str  # what runs the program's gloo process groups: gloo or unisono
    # where random generators start that no caller brings; the same on every worker
    seed: int = field(default_factory=fresh_seed)
    master_port: int = 29500  # the port of MASTER_PORT, at which nothing listens
    hosts: tuple[int, ...] = ()  # of several hosts, each with a launcher: how many workers each has
    host: int = 0  # which of these hosts this is

    @property
    def first_rank(self) -> int:
        """The rank of this launcher's first worker."""
        return sum(self.hosts[: self.host])

    @property
    def recovers(self) -> bool:
        """Whether the others continue when a worker is lost."""
        return self.restarts > 0

    def write(self) -> int:
        """Write the job to a new memfd and return its descriptor."""
        fields = asdict(self)
        del fields["payload"]
        with os.fdopen(os.memfd_create("unisono-job", os.MFD_CLOEXEC), "wb") as file:
            file.write(json.dumps(fields).encode("ascii") + b"\n")
            file.write(self.payload)
            file.flush()
            return os.dup(file.fileno())

    @classmethod
    def read(cls, fd: int) -> Job:
        """Read the job behind `fd`, which many processes may do at once."""
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as file:
            fields: dict[str, Any] = json.loads(file.readline())
            fields["argv"] = tuple(fields["argv"])
            fields["sys_path"] = tuple(fields["sys_path"])
            fields["hosts"] = tuple(fields["hosts"])
            return cls(**fields, payload=file.read())
