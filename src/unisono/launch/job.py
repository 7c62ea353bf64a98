"""What are the workers to do? One description, written once by the launcher, read by each worker.

It lies in a memfd, so it may be of any size, needs no file, and never fills a socket while the
fork server is still loading torch::

    | size of the description u64 | description (JSON) | payload (the pickled call) |
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import asdict, dataclass
from typing import Any

_SIZE = struct.Struct("!Q")

SCRIPT = "script"
MODULE = "module"
FUNCTION = "function"


@dataclass(frozen=True, slots=True)
class Job:
    """The same for every worker of a job.

    Attributes:
        kind: ``SCRIPT``, ``MODULE`` or ``FUNCTION``.
        target: the script's path, the module's name, or the function's name for messages.
        argv: what follows the script or module on the command line.
        environ: the launcher's environment variables.
        folder: the working directory.
        sys_path: where the caller of a function imports from; empty for scripts and modules.
        num_workers: how many workers there are.
        threads: how many threads each of them computes with.
        seed: where random generators start that no caller brings; the same on every worker.
        recovers: whether lost workers are made up for.
        backend: what runs the program's gloo process groups: gloo or unisono.
        master_port: at which ranks meet where the program does not say it; None without a network.
        payload: the pickled call; empty for scripts and modules.
    """

    kind: str
    target: str
    argv: tuple[str, ...]
    environ: dict[str, str]
    folder: str
    sys_path: tuple[str, ...]
    num_workers: int
    threads: int
    seed: int
    recovers: bool = True
    backend: str = "gloo"
    master_port: int | None = None
    payload: bytes = b""

    def write(self) -> int:
        """Write the job to a new memfd and return its descriptor."""
        fields = asdict(self)
        del fields["payload"]
        description = json.dumps(fields).encode("ascii")
        with os.fdopen(os.memfd_create("unisono-job", os.MFD_CLOEXEC), "wb") as file:
            file.write(_SIZE.pack(len(description)) + description)
            file.write(self.payload)
            file.flush()
            return os.dup(file.fileno())

    @classmethod
    def read(cls, fd: int) -> Job:
        """Read the job behind `fd`, which many processes may do at once."""
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as file:
            end = _SIZE.size + _SIZE.unpack_from(file)[0]
            fields: dict[str, Any] = json.loads(file[_SIZE.size : end])
            fields["argv"] = tuple(fields["argv"])
            fields["sys_path"] = tuple(fields["sys_path"])
            return cls(**fields, payload=file[end:])
