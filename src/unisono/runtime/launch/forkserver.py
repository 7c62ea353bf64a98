"""The launcher's handle on a fork server: start one, keep it, ask it for workers, end it.

A server is kept for the next job of the same thread, with which the kernel ends it, as loading
torch is the dear part. A job that finds none idle, or one whose environment no longer fits, starts
another.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.runtime.signals import signals_held_back
from unisono.runtime.workers.channel import Channel
from unisono.runtime.workers.launcher_messages import ForkWorker, SignalWorkers
from unisono.runtime.world import per_process

# Native libraries read these when they are loaded, so a running server cannot follow a change.
_READ_AT_LOAD = (
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_"),
    *("TORCH", "PYTORCH_", "ATEN_", "CUDA_", "LD_", "PYTHON"),
)
# torch sets this itself in whoever makes an optimizer, and reads it whenever it compiles.
_FOLLOWED = frozenset({"TORCHINDUCTOR_CACHE_DIR"})
# One thread in the server: OpenBLAS starts its threads when loaded, and forking wants one thread.
# Workers choose their number with torch.set_num_threads. NVML, unlike CUDA, survives a fork.
_OVERRIDES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# The working folder must not shadow modules while torch loads; workers get a sys.path of their own.
_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "sys.argv[1] in sys.path or sys.path.append(sys.argv[1]); "
    "from unisono.runtime.launch.server import main; main(*map(int, sys.argv[2:]))"
)


@dataclass(eq=False)
class ForkServer:
    """A running server. Final; made by :meth:`start`."""

    _process: subprocess.Popen[bytes]
    channel: Channel
    _environ: dict[str, str]

    @classmethod
    def start(cls, environ: Mapping[str, str]) -> ForkServer:
        """Start a server; returns at once, while it still loads torch."""
        ours, theirs = Channel.pair()
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        package_folder = str(Path(__file__).resolve().parents[3])
        arguments = [package_folder, str(theirs.fileno()), str(os.getpid())]
        with signals_held_back():
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", _START, *arguments],
                env={**environ, **_OVERRIDES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        return cls(process, ours, read_at_load(environ))

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def spawn(self, rank: int, incarnation: int, fds: Sequence[int]) -> None:
        """Ask for one worker; it may start only once torch is loaded."""
        self.channel.send(ForkWorker(rank, incarnation, tuple(fds)))

    def signal(self, ranks: Sequence[int], signum: int) -> None:
        """Send `signum` to those of `ranks` that still run; a dead server has none."""
        with suppress(ConnectionError):
            self.channel.send(SignalWorkers(tuple(ranks), signum))

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Tell whether this server lives and loaded its libraries with what `environ` says."""
        return self._process.poll() is None and self._environ == read_at_load(environ)

    def wait(self) -> int:
        """Wait for the server's end and return its exit status."""
        return self._process.wait()

    def kill(self) -> None:
        """End the server and with it every worker at once."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def close(self) -> None:
        """End the server: it leaves when it sees the end of the channel, or is made to."""
        self.channel.close()
        try:
            self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            # It may be in the middle of loading torch.
            self._process.kill()
            self._process.wait()


def read_at_load(environ: Mapping[str, str]) -> dict[str, str]:
    """Pick the variables that libraries read only when they are loaded."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_LOAD) and name not in _FOLLOWED
    }


class ServerPool:
    """The idle servers of this process. Final; use :func:`server_pool`."""

    def __init__(self) -> None:
        self._idle: dict[int, ForkServer] = {}  # by the thread that has started it
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        atexit.register(self.close)

    def borrow(self, environ: Mapping[str, str]) -> ForkServer:
        """Take this thread's idle server or start one; those that do not fit `environ` end."""
        with self._lock:
            for thread, server in list(self._idle.items()):
                if not server.fits(environ):
                    self._idle.pop(thread).close()
            idle = self._idle.pop(threading.get_native_id(), None)
        return idle or ForkServer.start(environ)

    def give_back(self, server: ForkServer) -> None:
        """Keep a server whose workers are all gone for the next job of this thread."""
        with self._lock:
            self._idle[threading.get_native_id()] = server

    def close(self) -> None:
        """End all idle servers. A fork of this process has none of its own to end."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            while self._idle:
                self._idle.popitem()[1].close()


def server_pool() -> ServerPool:
    """Return the pool of this process; a fork of it does not talk to its servers."""
    return per_process(ServerPool)
