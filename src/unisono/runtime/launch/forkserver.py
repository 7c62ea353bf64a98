"""The fork server: who starts workers in milliseconds? A process that has loaded torch and waits.

    launcher ──ToServer──► server ──fork──► workers
             ◄─FromServer─

Invariant: one thread, so that forking is safe; no worker outlives it and it does not outlive its
launcher (the kernel sees to both, with parent-death signals; and it sees the end of the channel).
Nor does what a worker has started: the server adopts what workers leave behind. A signal wakes it
when its launcher ends, even while it is stopped, and it takes everything below it along.

The launcher keeps a server for the next job of the same thread, with which the kernel ends it, as
loading torch is the dear part. A job that finds none idle, or one whose environment no longer fits,
starts another.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from unisono.runtime.procfs import adopt_orphans, die_with, kill_below, thread_has_ended
from unisono.runtime.signals import ENDING_SIGNALS, signals_held_back
from unisono.runtime.workers import launcher_messages as messages
from unisono.runtime.workers.launcher_messages import Channel
from unisono.runtime.workers.supervisor import PID_VARIABLE
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
_SEEN_WITHIN_S = 0.2
# The working folder must not shadow modules while torch loads; workers get a sys.path of their own.
_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "sys.argv[1] in sys.path or sys.path.append(sys.argv[1]); "
    "from unisono.runtime.launch.forkserver import main; main(*map(int, sys.argv[2:]))"
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
        here = os.getpid(), threading.get_native_id()
        arguments = [package_folder, str(theirs.fileno()), *map(str, here)]
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

    def signal(self, ranks: Sequence[int], signum: int) -> None:
        """Send `signum` to those of `ranks` that still run; a dead server has none."""
        with suppress(ConnectionError):
            self.channel.send(messages.SignalWorkers(tuple(ranks), signum))

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Return whether this server lives and loaded its libraries with what `environ` says."""
        return self._process.poll() is None and self._environ == read_at_load(environ)

    def wait(self) -> int:
        """Wait for the server's end and return its exit status."""
        return self._process.wait()

    def kill_all_below(self) -> None:
        """End every worker at once, and whatever workers have started."""
        if self._process.poll() is None:  # else its number may be another's by now
            kill_below(self.pid)

    def kill(self) -> None:
        """End the server and all below it at once."""
        self.kill_all_below()
        self._process.kill()
        self._process.wait()
        self.channel.close()


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
                    self._idle.pop(thread).kill()
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
                self._idle.popitem()[1].kill()


def server_pool() -> ServerPool:
    """Return the pool of this process; a fork of it does not talk to its servers."""
    return per_process(ServerPool)


# What every training script needs; torch loads _dynamo with the first optimizer.
PRELOADED = (
    *("torch", "torch._dynamo", "numpy.random", "cloudpickle"),
    *("unisono.runtime.launch.worker", "unisono.training.trainer"),
)


def main(channel_fd: int, launcher_pid: int, launcher_thread: int) -> NoReturn:
    """Load torch, then serve until the launcher is gone."""

    def look(signum: int, frame: FrameType | None) -> None:
        """End with the launcher; a shell that continues a job sends the same signal."""
        until_s = time.monotonic() + _SEEN_WITHIN_S
        while time.monotonic() < until_s:  # the kernel sends it while the thread is about to end
            if os.getppid() != launcher_pid or thread_has_ended(launcher_pid, launcher_thread):
                _end_all()
            time.sleep(0.01)

    adopt_orphans()
    signal.signal(signal.SIGCONT, look)
    if not die_with(launcher_pid, signal.SIGCONT):
        os._exit(0)
    ignores_hangups = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if not ignores_hangups:  # which workers tell by it
        signal.signal(signal.SIGHUP, lambda signum, frame: None)
    # Held back by the launcher since before this process began.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    channel = Channel.from_fd(channel_fd)
    load()
    _Server(channel).serve()


def _end_all() -> NoReturn:
    kill_below(os.getpid())
    os._exit(0)


def load() -> None:
    """Load what every script needs, so that forks of this process begin and end at once."""
    # What is imported stays; looking for garbage in it meanwhile is a fifth of the start-up.
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    # torch takes its operators back at the end, one by one: 55 ms of each worker, for nobody.
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False
    # Frozen objects are not visited by the workers' collector, so their pages stay shared.
    gc.freeze()
    gc.enable()


class _Server:
    """The loop: requests from the launcher, deaths of the children."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rank_of_pid: dict[int, int] = {}
        self._waiting: deque[messages.Message] = deque()
        self._wakeup, self._wakeup_writing = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> NoReturn:
        self._wakeup.setblocking(False)
        self._wakeup_writing.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wakeup_writing.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        while not self._channel.at_end:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._channel in ready:
                self._waiting.extend(self._channel.receive_ready())
            while self._waiting:
                match self._waiting.popleft():
                    case messages.ForkWorker() as wanted:
                        self._fork(wanted)
                    case messages.SignalWorkers(ranks, signum):
                        for pid, rank in self._rank_of_pid.items():
                            if rank in ranks:
                                os.kill(pid, signum)
            if self._wakeup in ready:
                self._wakeup.recv(4096)
            self._reap()
        _end_all()

    def _fork(self, wanted: messages.ForkWorker) -> None:
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                from unisono.runtime.launch.worker import be_worker  # which loads torch

                self._let_go_of_all()
                be_worker(wanted.rank, wanted.incarnation, wanted.fds, server_pid)
            finally:
                os._exit(70)
        self._rank_of_pid[pid] = wanted.rank
        self._tell(messages.Forked(wanted.rank, pid))
        for fd in wanted.fds:
            os.close(fd)

    def _let_go_of_all(self) -> None:
        """Close what is the server's, in a fork of it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        for owned in (self._selector, self._channel, self._wakeup, self._wakeup_writing):
            owned.close()
        # Those of later ranks, whose requests came while torch was loading.
        for message in self._waiting:
            for fd in getattr(message, "fds", ()):
                os.close(fd)

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # there is none
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                # Else it is what a worker has left behind.
                if (rank := self._rank_of_pid.pop(pid, None)) is not None:
                    exit_code = os.waitstatus_to_exitcode(status)
                    if exit_code:  # its replacement may need what they hold
                        kill_below(os.getpid(), started_by={PID_VARIABLE: str(pid)})
                    self._tell(messages.WorkerExited(rank, exit_code))

    def _tell(self, message: messages.FromServer) -> None:
        try:
            self._channel.send(message)
        except ConnectionError:
            # The launcher is gone; the next turn of the loop sees it and ends everything.
            self._channel.at_end = True
