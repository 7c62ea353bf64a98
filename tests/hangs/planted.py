"""Programs that get stuck: starting several, and waiting for the first word on each."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
        began_unix_s: when the hang began, as the program says.
        said_unix_s: when the explanation was complete.
    """

    program: str
    way: str
    workers: int
    folder: Path
    more: Sequence[str] = ()
    options: Sequence[str] = ()
    said: str = ""
    said_unix_s: float = 0.0
    pid: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _stdin: int = -1

    @property
    def note(self) -> Path:
        return self.folder / f"{self.program} {self.way}.began"

    @property
    def began_unix_s(self) -> float:
        return float(self.note.read_text())

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
        self.said_unix_s = time.time()
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


@contextlib.contextmanager
def stuck(planted: Planted) -> Iterator[Planted]:
    """Start a program and wait until it has been explained."""
    planted.begin()
    try:
        explain_all([planted], ends=False)
        yield planted
    finally:
        planted.end()


def explain_all(programs: Sequence[Planted], at_once: int = 8, *, ends: bool = True) -> None:
    """Wait for the first word on each program, starting and ending them where `ends` says so."""
    waiting = list(programs) if ends else []
    selector = selectors.DefaultSelector()
    running: dict[int, tuple[Planted, float]] = {}

    def watch(one: Planted) -> None:
        running[one.fileno()] = one, time.monotonic() + GIVE_UP_S
        selector.register(one.fileno(), selectors.EVENT_READ)

    def leave(fd: int) -> None:
        selector.unregister(fd)
        one, _ = running.pop(fd)
        if ends:
            one.end()

    for one in programs if not ends else ():
        watch(one)
    while waiting or running:
        while waiting and len(running) < at_once:
            waiting[0].begin()
            watch(waiting.pop(0))
        for key, _ in selector.select(0.5):
            if running[key.fd][0].read():
                leave(key.fd)
        for fd in [fd for fd, (_, until_s) in running.items() if time.monotonic() > until_s]:
            leave(fd)
    selector.close()
