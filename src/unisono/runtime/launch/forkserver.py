"""How do workers start in milliseconds? A fork server that has loaded torch forks them.

    launcher ──ToServer──► server ──fork──► workers
             ◄─FromServer─

Invariants: the server has one thread, so forking is safe. No worker outlives the server, and the
server does not outlive its launcher: the kernel ensures both with parent-death signals, and the
server also sees its channel close. A signal wakes it when its launcher ends, even if it is stopped.
The server adopts processes that workers leave behind, and kills everything below it when it ends.

Loading torch is the slow part, so the launcher keeps a server for the next job of the same thread;
the kernel ends the server with that thread. A job starts a new one if none fits its environment.
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
from typing import NoReturn, final

from unisono.errors import WorkerError
from unisono.runtime.limits import limits_behind
from unisono.runtime.notices import say
from unisono.runtime.procfs import adopt_orphans, die_with, kill_below, thread_has_ended
from unisono.runtime.signals import ENDING_SIGNALS, signals_held_back
from unisono.runtime.workers import launcher_messages as messages
from unisono.runtime.workers.channel import Channel
from unisono.runtime.workers.supervisor import PID_VARIABLE
from unisono.runtime.world import per_process

# Native libraries read these when they are loaded, so a running server cannot follow a change.
_READ_AT_LOAD = (
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_"),
    *("TORCH", "PYTORCH_", "ATEN_", "CUDA_", "LD_", "PYTHON"),
)
# torch sets this itself in a process that creates an optimizer, and reads it before compiling.
_FOLLOWED = frozenset({"TORCHINDUCTOR_CACHE_DIR"})
# The server must have one thread to fork safely, but OpenBLAS starts threads when it is loaded.
# Workers call torch.set_num_threads. NVML, unlike CUDA, survives a fork.
_OVERRIDES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_SEEN_WITHIN_S = 0.2
# The working directory must not shadow modules while torch loads; workers set their own sys.path.
_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "sys.argv[1] in sys.path or sys.path.append(sys.argv[1]); "
    "from unisono.runtime.launch.forkserver import main; main(*map(int, sys.argv[2:]))"
)


@final
@dataclass(eq=False)
class ForkServer:
    """A running server; created by :meth:`start`."""

    _process: subprocess.Popen[bytes]
    channel: Channel
    _environ: dict[str, str]

    @classmethod
    def start(cls, environ: Mapping[str, str]) -> ForkServer:
        """Start a server; return at once, while it still loads torch."""
        ours, theirs = Channel.pair()
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        package_folder = str(Path(__file__).resolve().parents[3])
        here = os.getpid(), threading.get_native_id()
        arguments = [package_folder, str(theirs.fileno()), *map(str, here)]
        try:
            with signals_held_back():
                process = subprocess.Popen(
                    [sys.executable, *flags, "-c", _START, *arguments],
                    env={**environ, **_OVERRIDES},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            ours.close()
            raise WorkerError(refused(error)) from error
        finally:
            theirs.close()
        return cls(process, ours, read_at_load(environ))

    @property
    def pid(self) -> int:
        """The server's PID."""
        return self._process.pid

    def signal(self, ranks: Sequence[int], signum: int) -> None:
        """Send `signum` to those of `ranks` that are still running; ignore a dead server."""
        with suppress(ConnectionError):
            self.channel.send(messages.SignalWorkers(tuple(ranks), signum))

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Return whether this server is alive and loaded its libraries with these variables."""
        return self._process.poll() is None and self._environ == read_at_load(environ)

    def wait(self) -> int:
        """Wait for the server to end and return its exit status."""
        return self._process.wait()

    def kill_all_below(self) -> None:
        """Kill every worker, and all processes that workers have started."""
        if self._process.poll() is None:  # else its PID may belong to another process by now
            kill_below(self.pid)

    def kill(self) -> None:
        """Kill the server and all processes below it."""
        self.kill_all_below()
        self._process.kill()
        self._process.wait()
        self.channel.close()


def read_at_load(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read only when they are loaded."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_LOAD) and name not in _FOLLOWED
    }


@final
class ServerPool:
    """The idle servers of this process; use :func:`server_pool`."""

    def __init__(self) -> None:
        self._idle: dict[int, ForkServer] = {}  # by the thread that started it
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        atexit.register(self.close)

    def borrow(self, environ: Mapping[str, str]) -> ForkServer:
        """Return this thread's idle server or start one; end servers that do not fit `environ`."""
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
        """End all idle servers. A fork of this process has no servers to end."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            while self._idle:
                self._idle.popitem()[1].kill()


def server_pool() -> ServerPool:
    """Return the pool of this process; a fork gets a pool without servers."""
    return per_process(ServerPool)


# What every training script needs; torch loads _dynamo with the first optimizer. A worker that has
# no descriptor left cannot load what it reports that with.
PRELOADED = (
    *("torch", "torch._dynamo", "numpy.random", "cloudpickle", "unisono.runtime.launch.pickling"),
    *("unisono.runtime.launch.worker", "unisono.training.trainer"),
)


def main(channel_fd: int, launcher_pid: int, launcher_thread: int) -> NoReturn:
    """Load torch, then serve until the launcher is gone."""

    def look(signum: int, frame: FrameType | None) -> None:
        """End if the launcher has ended; a shell that continues a job sends the same signal."""
        if os.getpid() != server_pid:
            return  # a worker that has just been forked
        until_s = time.monotonic() + _SEEN_WITHIN_S
        while time.monotonic() < until_s:  # the kernel may send it before the thread has ended
            if os.getppid() != launcher_pid or thread_has_ended(launcher_pid, launcher_thread):
                _end_all()
            time.sleep(0.01)

    server_pid = os.getpid()
    adopt_orphans()
    signal.signal(signal.SIGCONT, look)
    if not die_with(launcher_pid, signal.SIGCONT):
        os._exit(0)
    ignores_hangups = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # because of nohup
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if not ignores_hangups:  # workers check this
        signal.signal(signal.SIGHUP, lambda signum, frame: None)
    # The launcher has blocked them since before this process began.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    channel = Channel.from_fd(channel_fd)
    try:
        load()
    except (ImportError, MemoryError) as error:
        if not list(limits_behind(repr(error))):
            raise
        say(refused(error))
        os._exit(os.EX_OSERR)
    _Server(channel).serve()


def refused(error: BaseException) -> str:
    """Return a sentence on what the system refuses, and on the limit that may be behind it."""
    said = f"{type(error).__name__}: {error}"
    limits = "".join(f" {limit}" for limit in limits_behind(said))
    return f"the system must let a process for the workers start, but it does not: {said}.{limits}"


def _end_all() -> NoReturn:
    kill_below(os.getpid())
    os._exit(0)


def load() -> None:
    """Import what every script needs, so that forks start and end quickly."""
    # Imported objects stay; searching them for garbage would take a fifth of the start-up time.
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    # torch would unregister its operators one by one at exit: 55 ms per worker, without any use.
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False
    # The workers' collector does not visit frozen objects, so their pages stay shared.
    gc.freeze()
    gc.enable()


class _Server:
    """The event loop: requests from the launcher, and deaths of children."""

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
        try:
            pid = os.fork()
        except OSError as error:
            say(refused(error))
            os._exit(os.EX_OSERR)
        if pid == 0:
            try:
                from unisono.runtime.launch.worker import be_worker  # which loads torch

                self._let_go_of_all()
                be_worker(wanted.rank, wanted.incarnation, wanted.fds, server_pid)
            finally:
                os._exit(70)
        self._rank_of_pid[pid] = wanted.rank
        self._send(messages.Forked(wanted.rank, pid))
        for fd in wanted.fds:
            os.close(fd)

    def _let_go_of_all(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        for owned in (self._selector, self._channel, self._wakeup, self._wakeup_writing):
            owned.close()
        # Those of later ranks, whose requests arrived while torch was loading.
        for message in self._waiting:
            for fd in getattr(message, "fds", ()):
                os.close(fd)

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # there are no children
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                # Otherwise it is a process that a worker left behind.
                if (rank := self._rank_of_pid.pop(pid, None)) is not None:
                    exit_code = os.waitstatus_to_exitcode(status)
                    if exit_code:  # its replacement may need what they hold
                        kill_below(os.getpid(), started_by={PID_VARIABLE: str(pid)})
                    self._send(messages.WorkerExited(rank, exit_code))

    def _send(self, message: messages.FromServer) -> None:
        try:
            self._channel.send(message)
        except ConnectionError:
            # The launcher is gone; the loop ends everything in its next iteration.
            self._channel.at_end = True
