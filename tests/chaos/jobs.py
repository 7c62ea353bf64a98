"""A job as a user starts it, and hands to disturb it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import psutil
from tests.chaos.phases import read_phase
from tests.chaos.training import Options
from tests.warm.processes import start

PROGRAM = Path(__file__).with_name("training.py")
POLL_S = 0.002
TIMEOUT_S = 90.0


class Job:
    """``unisono run`` of the chaos tests' program, or plain python where `workers` is None. Final.

    `folder` is for what it prints. `program` is another script, with `arguments`, whose workers may
    tell their `phases`; `python` an interpreter whose Unisono may be another version.
    """

    def __init__(
        self,
        folder: Path,
        options: Options | None = None,
        *,
        workers: int | None = None,
        flags: tuple[object, ...] = ("--restarts", 100),
        faults: str = "",
        variables: Mapping[str, str] | None = None,
        program: Path = PROGRAM,
        arguments: tuple[object, ...] = (),
        popen: type[subprocess.Popen[bytes]] = start,
        python: str = sys.executable,
        phases: str = "",
    ) -> None:
        starter = [python]
        if workers is not None:
            starter += ["-m", "unisono", "run", "-n", str(workers), *map(str, flags)]
        given = [json.dumps(asdict(options))] if options is not None else list(map(str, arguments))
        self._phases = Path(phases if options is None else options.phases)
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = popen(
                [*starter, str(program), *given],
                stdout=out,
                stderr=err,
                env={**os.environ, "UNISONO_FAULTS": faults, **(variables or {})},
                start_new_session=True,
            )
        self._launcher = psutil.Process(self.process.pid)
        self._server: psutil.Process | None = None

    @property
    def out(self) -> str:
        """What the program has printed so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What the launcher has said so far, and what workers wrote to standard error."""
        return self._err.read_text()

    @property
    def results(self) -> list[dict[str, object]]:
        """What the workers that came to their end have found."""
        lines = (line for line in self.out.splitlines() if line.startswith("result: "))
        return [json.loads(line.removeprefix("result: ")) for line in lines]

    @property
    def server(self) -> psutil.Process:
        """The process that makes workers."""
        if self._server is None:
            (self._server,) = self._launcher.children()
        return self._server

    def workers(self) -> list[psutil.Process]:
        """The processes of workers, oldest first."""
        try:
            children = self.server.children()
        except (psutil.Error, ValueError):
            return []
        return sorted(children, key=lambda process: process.pid)

    def phase(self, process: psutil.Process) -> tuple[str, int]:
        """Tell the phase and the step of a worker, dead or alive."""
        return read_phase(self._phases, process.pid)

    def processes(self) -> list[psutil.Process]:
        """All that belongs to the job."""
        try:
            return [self._launcher, *self._launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_for(self, words: str) -> None:
        """Wait until somebody has said `words`."""
        self.wait_until(lambda: words in self.err or words in self.out, f"{words!r} is said")

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until `holds` says so, and no longer than the job runs."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not holds():
            ended = self.process.poll()
            if ended is not None or time.monotonic() > deadline_s:
                if holds():
                    return
                self.end()
                raise AssertionError(f"not until {what}: {ended}\n{self.out}\n{self.err}")
            time.sleep(POLL_S)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end; returns the exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"it hangs:\n{self.out}\n{self.err}") from None

    def end(self) -> None:
        """End all that is left of it."""
        for process in self.processes():
            if process.is_running():
                process.kill()
        self.process.wait()


def gone_within(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for the end of processes; returns those that are still there."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
