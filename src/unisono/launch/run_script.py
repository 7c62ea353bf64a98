"""What does ``unisono run`` do once its arguments are known? Run the script on workers to its end.

Invariant: whatever happens, all workers are gone when this returns, and the status says why.
"""

from __future__ import annotations

from unisono.launch.forkserver import ForkServer
from unisono.launch.job import Job
from unisono.launch.report import exit_status, failure_message, interrupt_message
from unisono.launch.signals import AGENT_ENDED, ENDING_SIGNALS, signals_as_bytes
from unisono.launch.supervise import supervise
from unisono.notices import say


def run(job: Job) -> int:
    """Run a script or module on workers and return the exit status of it all."""
    ending = (*ENDING_SIGNALS, AGENT_ENDED) if job.hosts else ENDING_SIGNALS
    with signals_as_bytes(ending) as signals:
        server = ForkServer.start(job.environ)
        try:
            state = supervise(server, job, signals).state
        finally:
            server.close()
    if state.interrupted_by is not None:
        say(interrupt_message(state, job.num_workers))
    elif state.cause is not None:
        on_host = f"on host {job.host}, " if job.hosts else ""
        say(on_host + failure_message(state, job.num_workers))
    return exit_status(state, is_one_of_several=bool(job.hosts))
