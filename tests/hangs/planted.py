"""Programs that get stuck: starting several, and waiting for the first word on each."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.warm.processes import start

PROGRAMS = Path(__file__).parent / "programs"
LAST_WORDS = "shows where every rank is, at any time."
GIVE_UP_S = 60.0


@dataclass
class Planted:
    """One program, as `unisono run` starts it.

    Attributes:
        said: what came on standard error.
    """

    program: str
    way: str
    workers: int
    folder: Path
    more: Sequence[str] = ()
    options: Sequence[str] = ()
    said: str = ""
    pid: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _stdin: int = -1

    @property
    def note(self) -> Path:
        return self.folder / f"{self.program} {self.way}.began"

    def begin(self) -> None:
        reading, self._stdin = os.pipe()  # nobody ever writes there
        options = ["run", "-n", str(self.workers), "--threads", "1", *self.options]
        script = [str(PROGRAMS / f"{self.program}.py"), self.way, str(self.note), *self.more]
        self._process = start(
            [sys.executable, "-m", "unisono", *options, *script],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        os.close(reading)

    def explain(self) -> None:
        """Run it until the launcher has said the first word on it, or for long."""
        self.begin()
        assert self._process is not None
        assert self._process.stderr is not None
        fd, until_s = self._process.stderr.fileno(), time.monotonic() + GIVE_UP_S
        try:
            while LAST_WORDS not in self.said:
                ready, _, _ = select.select([fd], [], [], max(0.0, until_s - time.monotonic()))
                if not ready or not (data := os.read(fd, 1 << 16)):
                    return
                self.said += data.decode()
        finally:
            self.end()

    def end(self) -> None:
        """End the launcher; the kernel ends its workers, also what is stopped.

        What these have started is ended here: torch's loader processes look for their parent
        between two batches alone, and one that opens a FIFO has nobody who waits for it.
        """
        assert self._process is not None
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        if self._process.stderr is not None:
            self._process.stderr.close()
        os.close(self._stdin)


def explain_all(programs: Sequence[Planted]) -> None:
    """Start programs, several at a time, wait for the first word on each, and end it."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(Planted.explain, programs))
