"""What does ``unisono run`` do once its arguments are known? Run the script on workers to its end.

Invariant: whatever happens, all workers are gone when this returns, and the status says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from unisono.c10d.gloo import GLOO
from unisono.callbacks.cell import environment_of_workers
from unisono.launch.environment import launch_environment
from unisono.launch.forkserver import ForkServer
from unisono.launch.job import Job
from unisono.launch.recovery import RESTARTS
from unisono.launch.report import exit_status, failure_message, interrupt_message
from unisono.launch.signals import ENDING_SIGNALS, signals_as_bytes
from unisono.launch.stalls import TIMEOUT_S
from unisono.launch.supervise import supervise
from unisono.notices import say
from unisono.seeding import fresh_seed


def run(
    kind: str,
    target: str,
    argv: tuple[str, ...],
    *,
    workers: int,
    threads: int,
    restarts: int = RESTARTS,
    replaces: bool = True,
    stall_timeout_s: float = TIMEOUT_S,
    gpus: tuple[str, ...] = (),
    debug: bool = False,
    backend: str = GLOO,
) -> int:
    """Run a script or module on `workers` workers and return the exit status of it all."""
    environ = launch_environment(os.environ, ["unisono", *sys.argv[1:]], gpus, debug=debug)
    environ = environment_of_workers(environ, launcher_draws=False)
    with signals_as_bytes(ENDING_SIGNALS) as signals:
        server = ForkServer.start(environ)
        try:
            job = _job(kind, target, argv, workers, threads, environ, restarts > 0, backend)
            ended = supervise(
                server,
                job,
                restarts=restarts,
                replaces=replaces,
                stall_timeout_s=stall_timeout_s,
                signals=signals,
            )
        finally:
            server.close()
    if ended.state.interrupted_by is not None:
        say(interrupt_message(ended.state, workers))
    elif ended.state.cause is not None:
        say(failure_message(ended.state, workers))
    return exit_status(ended.state)


def _job(
    kind: str,
    target: str,
    argv: tuple[str, ...],
    workers: int,
    threads: int,
    environ: Mapping[str, str],
    recovers: bool,
    backend: str,
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
        seed=fresh_seed(),
        recovers=recovers,
        backend=backend,
    )
