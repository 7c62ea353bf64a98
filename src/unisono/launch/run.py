"""What does ``unisono run`` do once its arguments are known? Run the script on workers to its end.

Invariant: whatever happens, all workers are gone when this returns, and the status says why.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from unisono.launch.forkserver import ForkServer
from unisono.launch.job import Job
from unisono.launch.report import exit_status, failure_message, interrupt_message
from unisono.launch.supervise import supervise

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(kind: str, target: str, argv: tuple[str, ...], *, workers: int, threads: int) -> int:
    """Run a script or module on `workers` workers and return the exit status of it all."""
    environ = dict(os.environ)
    with _signals_as_bytes() as signals:
        server = ForkServer.start(environ)
        try:
            job = _job(kind, target, argv, workers, threads, environ)
            ended = supervise(server, job, signals=signals)
        finally:
            server.close()
    if ended.state.interrupted_by is not None:
        print(f"unisono: {interrupt_message(ended.state, workers)}", file=sys.stderr)
    elif ended.state.cause is not None:
        print(f"unisono: {failure_message(ended.state, workers)}", file=sys.stderr)
    return exit_status(ended.state)


def _job(
    kind: str,
    target: str,
    argv: tuple[str, ...],
    workers: int,
    threads: int,
    environ: Mapping[str, str],
) -> Job:
    return Job(
        kind=kind,
        target=target,
        argv=argv,
        environ=dict(environ),
        folder=os.getcwd(),
        sys_path=(),
        num_workers=workers,
        threads=threads,
        seed=int.from_bytes(os.urandom(7), "little"),
    )


@contextmanager
def _signals_as_bytes() -> Iterator[socket.socket]:
    """Give a socket that receives the number of each signal that asks this process to end."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    before = {}
    for signum in _ENDING_SIGNALS:
        # Who ignores a signal from the start (nohup, a shell's background job) has a reason.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, lambda signum, frame: None)
    wakeup_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        reading.close()
        writing.close()
