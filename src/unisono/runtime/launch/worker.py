"""What happens in a worker, from the fork to its exit?

    take over descriptors, signals, environment → run the program → report how it ended → exit

Invariant: a worker reports every end of its program to the launcher before its process ends, except
ends that no process survives; and no state of the fork server is left in a worker. A process that
the program forks is not a worker: it ends as it would anywhere else, and reports nothing.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from unisono.runtime.faults import Faults
from unisono.runtime.hangs.stacks import allow_launcher_to_inspect
from unisono.runtime.launch import exceptions, torch_patches
from unisono.runtime.launch.job import Job, worker_environment
from unisono.runtime.launch.program import run_program
from unisono.runtime.notices import text_of
from unisono.runtime.procfs import die_with
from unisono.runtime.signals import NOTICES
from unisono.runtime.workers import supervisor
from unisono.runtime.workers.context import context
from unisono.runtime.workers.control_block import Head
from unisono.runtime.workers.launcher_messages import Begun, ProgramDone, ProgramFailed

_BUFFERED = (io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)
_BOOTSTRAP_FAILED = 70  # EX_SOFTWARE of sysexits.h
_LAUNCHER_HEARS_WITHIN_S = 1.0  # else a signal was meant only for this worker, and ends it


def be_worker(rank: int, incarnation: int, fds: tuple[int, ...], server_pid: int) -> NoReturn:
    """Turn a new fork of the server into worker `rank`; never returns.

    `fds`: standard input, output, error; the job; the control block; the store; the channel.
    """
    exit_code = _BOOTSTRAP_FAILED
    try:
        if not die_with(server_pid):
            os._exit(_BOOTSTRAP_FAILED)
        allow_launcher_to_inspect(server_pid)
        _take_over_signals()
        *standard, job_fd, control_fd, store_fd, link_fd = fds
        _take_over_standard_streams(standard)
        job = Job.read(job_fd)
        os.close(job_fd)
        names = {
            supervisor.LINK_VARIABLE: str(link_fd),
            supervisor.CONTROL_VARIABLE: str(control_fd),
            supervisor.STORE_VARIABLE: str(store_fd),
            supervisor.PID_VARIABLE: str(os.getpid()),
            supervisor.INCARNATION_VARIABLE: str(incarnation),
            supervisor.RECOVERS_VARIABLE: str(int(job.restarts > 0)),
        }
        environ = worker_environment(job, rank, names)
        os.environ.clear()
        os.environ.update(environ)
        link = context().launcher
        assert link is not None
        _leave_to_launcher(link.control.head)
        Faults.from_environment(os.environ, rank, incarnation).meet("start")
        exit_code = _live(job, rank, link)
    except BaseException:
        # Print it here: the launcher sees only the exit status.
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def _take_over_signals() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The launcher handles Ctrl-C. Subprocesses do not inherit a handler, unlike SIG_IGN.
    signal.signal(signal.SIGINT, lambda signum, frame: None)


def _leave_to_launcher(head: Head) -> None:
    """Ignore notices that the launcher has received too, as Slurm signals all processes."""
    worker = os.getpid()

    def wait(signum: int, frame: FrameType | None) -> None:
        until_s = time.monotonic() + _LAUNCHER_HEARS_WITHIN_S
        while os.getpid() == worker and not head.is_over and time.monotonic() < until_s:
            if head.end:
                return
            time.sleep(0.01)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    for signum in NOTICES:
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, wait)


def _take_over_standard_streams(fds: list[int]) -> None:
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Write whole lines at once, so that those of different workers do not mix; also under
            # `python -u`, which would write each piece of a line separately.
            stream.reconfigure(line_buffering=True, write_through=False)


def _live(job: Job, rank: int, link: supervisor.LauncherLink) -> int:
    """Run the program and report how it ended; return the exit status."""
    result: bytes = b""
    ended: BaseException | None = None
    worker = os.getpid()
    try:
        import torch

        os.chdir(job.folder)
        torch.set_num_threads(job.threads)
        if torch.distributed.is_available():
            torch_patches.apply(torch_patches.patches(link.control, rank, job.backend))
        link.notify(Begun())
        try:
            result = run_program(job)
        finally:
            context().leave_loops()
        if (unsaved := context().unsaved) is not None:
            raise unsaved
    except BaseException as error:
        ended = error
    exit_code, text = _exit_status(ended)
    is_worker = os.getpid() == worker
    if ended is not None and exit_code:
        if is_worker:
            _report_failure(link, ended, exit_code, text)
        else:
            _print_failure(ended, text)
    _finish_as_python_does()
    if is_worker and not exit_code:
        link.notify(ProgramDone(result))
    return exit_code


def _exit_status(ended: BaseException | None) -> tuple[int, str]:
    """Return what Python's exit status would be, and what it would print for a ``SystemExit``."""
    if not isinstance(ended, SystemExit):
        return int(ended is not None), ""
    if isinstance(ended.code, int | None):
        return (ended.code or 0) & 0xFF, ""
    return 1, text_of(ended.code)


def _report_failure(
    link: supervisor.LauncherLink, error: BaseException, exit_code: int, text: str
) -> None:
    if not isinstance(error, SystemExit):
        _call_own_excepthook(error)
        text = exceptions.traceback_text(error)
    link.notify(
        ProgramFailed(
            exit_code,
            summary=exceptions.shortened(exceptions.summary_line(error)),
            traceback=exceptions.shortened(text),
            waited_for=exceptions.lost_peer(error),
            is_disconnect=exceptions.is_disconnect(error),
            payload=exceptions.pack_exception(error),
        )
    )


def _print_failure(error: BaseException, text: str) -> None:
    if isinstance(error, SystemExit):
        sys.stderr.write(f"{text}\n" if text else "")
    elif not _call_own_excepthook(error):
        sys.stderr.write(exceptions.traceback_text(error))


def _call_own_excepthook(error: BaseException) -> bool:
    """Call a hook that the program has set (error trackers do); Python's own would only print."""
    hook = exceptions.own_excepthook(sys.excepthook)
    if hook is not None:
        _continue(lambda: hook(type(error), error, error.__traceback__))
    return hook is not None


def _finish_as_python_does() -> None:
    _continue(threading._shutdown)  # type: ignore[attr-defined]
    _continue(atexit._run_exitfuncs)
    _continue(_close_files)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            _continue(stream.flush)


def _close_files() -> None:
    """Write out files that the program left open: `os._exit` would lose their buffers."""
    streams = (sys.stdout, sys.stderr)
    ours = {id(owner) for one in streams for owner in (one, getattr(one, "buffer", None))}
    # The class under the abstract one: checking every object against an abstract class is slow.
    files = [item for item in gc.get_objects() if issubclass(type(item), io.IOBase.__mro__[1])]
    # Text files first, then files implemented in Python such as a GzipFile, then plain files.
    files.sort(key=lambda file: (not isinstance(file, io.TextIOBase), type(file) in _BUFFERED))
    for file in files:
        if id(file) not in ours:
            _continue(partial(_write_out, file))


def _write_out(file: Any) -> None:
    """Flush a file, or close it if flushing is not enough; a thread may still read others."""
    try:
        if isinstance(file, io.RawIOBase | io.BytesIO | io.StringIO) or not file.writable():
            return
    except Exception:  # closed, or partly constructed
        return
    if type(file) in (io.TextIOWrapper, *_BUFFERED):
        file.flush()
    else:
        file.close()


def _continue(act: Callable[[], object]) -> None:
    """Run one of the last actions; like Python, print a failure and continue with the next one."""
    try:
        act()
    except BaseException:
        with suppress(Exception):  # the program may have closed standard error
            traceback.print_exc()
