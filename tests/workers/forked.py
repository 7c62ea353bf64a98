"""Workers that nobody of ours launched, as forks of the test: each with variables of its own.

A fork ends as an interpreter does: it shows what it raised, then does what was to be done at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from unisono.runtime.workers.job_store import announcements, job_name
from unisono.runtime.world import world

TIMEOUT_S = 30.0


@dataclass
class Said:
    """What a fork returned, or the kind and text of what it raised; None where it died."""

    value: Any = None
    error: str = ""
    text: str = ""
    exit_code: int = 0


class Forked:
    """One process that does `work()` with `environ`."""

    def __init__(self, work: Callable[[], Any], environ: Mapping[str, str]) -> None:
        self._read, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._read)
            _live(work, environ, write)
        os.close(write)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def end(self) -> Said:
        """Wait for its end and hear what it said."""
        with os.fdopen(self._read, "rb") as pipe:
            told = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        said = Said(**json.loads(told)) if told else Said()
        said.exit_code = os.waitstatus_to_exitcode(status)
        return said


def _live(work: Callable[[], Any], environ: Mapping[str, str], write: int) -> None:
    exit_code = 1
    try:
        gc.freeze()  # so that whoever collects here need not visit, and copy, all of the test
        atexit._clear()
        sys.excepthook = lambda *_: None
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's is not for forks
        signal.alarm(int(TIMEOUT_S))
        os.environ.clear()
        os.environ.update(environ)
        try:
            said = {"value": work()}
            exit_code = 0
        except BaseException as error:
            said = {"error": type(error).__name__, "text": str(error)}
            sys.excepthook(type(error), error, error.__traceback__)
        os.write(write, json.dumps(said).encode())
        atexit._run_exitfuncs()
    finally:
        os._exit(exit_code)


class Job:
    """The workers of one job."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.started: list[Forked] = []

    def environ(self, rank: int, world_size: int, **more: str) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": str(world_size), **self._variables, **more}

    def start(self, work: Callable[[], Any], rank: int, world_size: int, **more: str) -> Forked:
        self.started.append(Forked(work, self.environ(rank, world_size, **more)))
        return self.started[-1]

    def run(self, work: Callable[[int], Any], world_size: int, **more: str) -> list[Said]:
        """Do `work(rank)` on every rank."""
        ranks = range(world_size)
        forks = [self.start(lambda r=rank: work(r), rank, world_size, **more) for rank in ranks]
        return [fork.end() for fork in forks]

    def together(
        self, work: Callable[[], Any], ranks: Sequence[int], world_size: int, **more: str
    ) -> list[Said]:
        """Do `work()` on some ranks, on none before the last of them has been forked."""
        there, go = os.pipe(), os.pipe()

        def once_all_are_there() -> Any:
            os.write(there[1], b"x")
            os.read(go[0], 1)
            return work()

        forks = [self.start(once_all_are_there, rank, world_size, **more) for rank in ranks]
        for _ in ranks:
            os.read(there[0], 1)
        os.write(go[1], b"x" * len(ranks))
        for fd in (*there, *go):
            os.close(fd)
        return [fork.end() for fork in forks]

    def wait_for_rank_0(self, world_size: int) -> None:
        """Wait until rank 0 can be found."""
        environ = self.environ(0, world_size)
        name = job_name(environ, world(environ), session=os.getsid(0))
        deadline = time.monotonic() + TIMEOUT_S
        while not announcements(name):
            assert time.monotonic() < deadline, "rank 0 has not come"
            time.sleep(0.001)


@pytest.fixture
def job() -> Iterator[Job]:
    # Nobody listens there; no other test that runs now calls its job so.
    job = Job({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{os.getpid()}1"})
    yield job
    for fork in job.started:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(fork.pid, os.WNOHANG) == (0, 0):
                fork.kill()
                os.waitpid(fork.pid, 0)
