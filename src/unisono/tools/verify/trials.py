"""Runs a program for some steps, in separate folders, and reports how each run ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import final

from unisono.runtime.c10d.registration import GLOO
from unisono.runtime.launch.forkserver import server_pool
from unisono.runtime.launch.job import MODULE, SCRIPT, Job, launch_environment
from unisono.runtime.launch.report import failure_message
from unisono.runtime.launch.supervise import supervise
from unisono.runtime.notices import plural
from unisono.runtime.signals import ENDING_SIGNALS, signals_as_bytes
from unisono.tools.verify.recorder import Limits, copy_folder
from unisono.tools.verify.trace import RankTrace, read_trace

_ALARM_AGAIN_S = 5.0
_STALL_TIMEOUT_S = 20.0  # how long ranks may wait without any of them moving


@dataclass(frozen=True, slots=True)
class Program:
    """The program to run, as in :class:`Job`."""

    kind: str
    target: str
    args: tuple[str, ...]
    folder: Path


@dataclass(frozen=True, slots=True)
class Trial:
    """How one run ended."""

    traces: tuple[RankTrace, ...]  # what each rank recorded
    failure: str = ""  # why it did not end well; empty if it did
    interrupted_by: int | None = None  # the signal that the user ended it with

    @property
    def trouble(self) -> str:
        """The number of ranks of a run that failed, and why; empty if it ended well."""
        return self.failure and f"On {plural(len(self.traces), 'rank')}: {self.failure}"


@contextmanager
def trials_of(program: Program, limits: Limits, environ: Mapping[str, str]) -> Iterator[Trials]:
    """Yield what runs a program in folders, which are deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
        trials = Trials(program, limits, Path(folder), environ)
        try:
            yield trials
        finally:
            server_pool().give_back(trials.server)


@final
class Trials:
    """Runs of one program, one after another, from one fork server, in one folder."""

    def __init__(
        self, program: Program, limits: Limits, folder: Path, environ: Mapping[str, str]
    ) -> None:
        self._program, self.limits, self.folder = program, limits, folder
        self._environ = launch_environment(environ, ["unisono", *sys.argv[1:]])
        self.server = server_pool().borrow(self._environ)

    def run(
        self, world_size: int, name: str, feed: Path | None = None, files: Path | None = None
    ) -> Trial:
        """Run the program, on the samples of another run if there is a `feed`.

        `files` is a copy of the working folder that is kept for the next run, and created if it
        does not exist; None: a copy that is deleted.
        """
        folder = self.folder / name
        folder.mkdir()
        limits = replace(self.limits, folder=str(folder), feed=str(feed or ""))
        (folder / "options.json").write_text(json.dumps(asdict(limits)))
        copy = self.folder / f"{name}-files" if files is None else files
        if not copy.exists():
            copy_folder(self._program.folder, copy)
        try:
            return self._supervised(world_size, folder, copy)
        finally:
            if files is None:
                shutil.rmtree(copy, ignore_errors=True)

    def _supervised(self, world_size: int, folder: Path, copy: Path) -> Trial:
        job = self._job(world_size, folder, copy)
        awaited = (*ENDING_SIGNALS, signal.SIGALRM)
        with _alarm(self.limits.timeout_s), signals_as_bytes(awaited) as signals:
            ended = supervise(self.server, job, signals)
        if not ended.server_is_usable:
            self.server.kill()
            self.server = server_pool().borrow(self._environ)
        signum, failure = ended.state.interrupted_by, ""
        if signum == signal.SIGALRM:
            signum, failure = None, f"it took longer than {self.limits.timeout_s:g} s"
        elif signum is not None:
            failure = "interrupted"
        elif ended.state.cause is not None:
            failure = failure_message(ended.state, world_size)
            failure = failure.replace(str(copy), str(self._program.folder))
        traces = tuple(read_trace(folder, rank) for rank in range(world_size))
        troubles = [text for trace in traces for text in trace.notes("trouble")]
        if troubles and not failure:
            failure = f"not all that it did could be recorded:\n\n{troubles[0]}"
        return Trial(traces, failure, signum)

    def _job(self, world_size: int, folder: Path, copy: Path) -> Job:
        program = self._program
        target = program.target
        here = Path(os.path.abspath(program.folder / target))
        if program.kind == SCRIPT:
            target = str(here)  # a script in another folder is not copied
            if here.is_relative_to(program.folder):
                there = copy / here.relative_to(program.folder)
                target = target if there.is_symlink() else str(there)
        return Job(
            kind=MODULE,
            target=self.limits.module,
            argv=(str(folder / "options.json"), program.kind, target, *program.args),
            environ=self._environ,
            folder=str(copy),
            num_workers=world_size,
            threads=self.limits.threads,
            restarts=0,
            replaces=False,
            stall_timeout_s=_STALL_TIMEOUT_S,
            backend=GLOO,
            seed=0,
        )


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Send SIGALRM after some seconds within a block, and repeatedly after that."""
    before = signal.signal(signal.SIGALRM, lambda signum, frame: None)
    signal.setitimer(signal.ITIMER_REAL, seconds, _ALARM_AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
