"""Programs that get stuck: starting several, and waiting for the first word on each."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
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
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)

    def fileno(self) -> int:
        assert self._process is not None
        assert self._process.stderr is not None
        return self._process.stderr.fileno()

    def read(self) -> bool:
        """Read what has come; tell whether all is said."""
        data = os.read(self.fileno(), 1 << 16)
        self.said += data.decode()
        return LAST_WORDS in self.said or not data

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


def explain_all(programs: Sequence[Planted], at_once: int = 8) -> None:
    """Start programs, wait for the first word on each, and end it."""
    waiting = list(programs)
    selector = selectors.DefaultSelector()
    running: dict[int, tuple[Planted, float]] = {}

    def leave(fd: int) -> None:
        selector.unregister(fd)
        running.pop(fd)[0].end()

    while waiting or running:
        while waiting and len(running) < at_once:
            one = waiting.pop(0)
            one.begin()
            running[one.fileno()] = one, time.monotonic() + GIVE_UP_S
            selector.register(one.fileno(), selectors.EVENT_READ)
        for key, _ in selector.select(0.5):
            if running[key.fd][0].read():
                leave(key.fd)
        for fd in [fd for fd, (_, until_s) in running.items() if time.monotonic() > until_s]:
            leave(fd)
    selector.close()
