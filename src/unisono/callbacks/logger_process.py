"""The process that talks to a logger: the leader's handle on it, and what it does.

It loads neither torch nor the program. Lines of JSON come in: first what the run is, then
``[kind, step, values]``, last ``{"end": status}``; if its leader is lost, the last is missing. What
went wrong goes out, as text, before it ends with 1.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from unisono.plainfile import open_plain

# The file of each package: what a line of JSON may have loaded.
HOMES = {"wandb": "wandb_run", "mlflow": "mlflow_run", "trackio": "trackio_run"}
_STUCK_S = 60.0  # a logger that takes nothing for so long is switched off
_LEFT_S = 600  # so long it sends what a lost leader has left, and the next one waits for it
_CHUNK_BYTES = 1 << 16
_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "sys.argv[1] in sys.path or sys.path.append(sys.argv[1]); "
    "from unisono.callbacks.logger_process import main; sys.exit(main())"
)


class Row(NamedTuple):
    """Numbers of one step, by name."""

    step: int
    values: dict[str, float]


class LoggerRun(Protocol):
    """A run of a logger that is open; each logger's file has a function ``begin`` that opens it."""

    @property
    def run_id(self) -> str:
        """What finds it again."""

    def log(self, rows: list[Row]) -> None:
        """Take rows, of ascending steps; the same step may come twice, with other names."""

    def end(self, status: str) -> None:
        """Send all, and close: "finished", "failed", "stopped", or "" if it will continue."""


class LoggerProcess:
    """The leader's handle. Final.

    Args:
        run_file: see :class:`RunFile`. It is locked here if it can be at once, so that the process
            of the first leader has it before that of the next one, however long they take to start.

    Raises:
        OSError: it cannot be started, as in all methods: it has failed, or takes nothing.
    """

    def __init__(self, run_file: Path) -> None:
        fd = open_plain(run_file, os.O_RDWR | os.O_CREAT)
        try:
            with suppress(OSError):  # another one has it, or a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(Path(__file__).resolve().parents[2]), str(fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the program
                bufsize=0,
                pass_fds=[fd],
            )
        finally:
            os.close(fd)
        assert self._process.stdin is not None, "a pipe"
        self._fd = self._process.stdin.fileno()
        os.set_blocking(self._fd, False)
        self._unsent = bytearray()
        self._moved_at_s = time.monotonic()

    def send(self, message: Any) -> None:
        """Send a message, now or with a later one; never waits."""
        if not self._unsent:
            self._moved_at_s = time.monotonic()
        self._unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._push()
        if self._unsent and time.monotonic() - self._moved_at_s > _STUCK_S:
            raise OSError(f"it has taken nothing for {_STUCK_S:.0f} s")

    def end(self, status: str, within_s: float) -> None:
        """Have it send all, and wait for its end."""
        until_s = time.monotonic() + within_s
        self._unsent += json.dumps({"end": status}).encode() + b"\n"
        while self._unsent and (left_s := until_s - time.monotonic()) > 0:
            select.select([], [self._fd], [], left_s)
            self._push()
        try:
            said, _ = self._process.communicate(timeout=max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise OSError(f"it has not sent all within {within_s:g} s") from None
        if self._process.returncode:
            raise OSError(said.decode(errors="replace").strip() or "its process has ended")

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._fd, self._unsent)]
                self._moved_at_s = time.monotonic()
        except BlockingIOError:
            pass
        except BrokenPipeError:
            raise OSError(self._last_words()) from None

    def _last_words(self) -> str:
        assert self._process.stdout is not None, "a pipe"
        is_said, _, _ = select.select([self._process.stdout], [], [], 1.0)
        said = os.read(self._process.stdout.fileno(), _CHUNK_BYTES) if is_said else b""
        return said.decode(errors="replace").strip() or "its process has ended"


def main() -> int:
    """Send what comes in, until the end."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the end of the pipe is what ends it
    said = os.dup(1)
    os.dup2(2, 1)  # loggers print
    try:
        _serve(_messages(0), int(sys.argv[2]))
    except BaseException as error:
        os.write(said, f"{type(error).__name__}: {error}".encode(errors="replace")[:_CHUNK_BYTES])
        os._exit(1)
    os._exit(0)  # whatever a logger wants to wait for, it was waited for


def _serve(batches: Iterator[list[Any]], run_fd: int) -> None:
    messages = next(batches, None)
    if messages is None:
        return
    head = messages.pop(0)
    begin = importlib.import_module(f"unisono.callbacks.{HOMES[head['module']]}").begin
    run_file = RunFile(run_fd)
    status = ""
    if head["is_new"]:
        run_file.forget()
    run: LoggerRun = begin(head["folder"], head["settings"], head["config"], run_file.run_id)
    run_file.keep(run.run_id)
    while messages is not None:
        if messages and isinstance(messages[-1], dict):
            status = messages.pop()["end"]
        if rows := run_file.new_of(messages):
            run.log(rows)
            run_file.keep(run.run_id)
        messages = None if status else next(batches, None)
    signal.alarm(_LEFT_S)
    run.end(status)


def _messages(fd: int) -> Iterator[list[Any]]:
    """Read as many messages as there are, again and again."""
    rest = b""
    while read := os.read(fd, _CHUNK_BYTES):
        *lines, rest = (rest + read).split(b"\n")
        if lines:
            yield [json.loads(line) for line in lines]


class RunFile:
    """The run's id and the last step sent of each kind; locked while it is used. Final.

    Args:
        fd: of the file; opened by the leader, which may have locked it already.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock()
        text = os.pread(self._fd, _CHUNK_BYTES, 0)
        self.run_id: str | None = None
        self._sent: dict[str, int] = {}
        with suppress(ValueError, TypeError, KeyError):
            found = json.loads(text)
            self.run_id, self._sent = str(found["id"]), dict(found["sent"])

    def forget(self) -> None:
        """Begin another run."""
        self.run_id, self._sent = None, {}
        os.ftruncate(self._fd, 0)

    def new_of(self, messages: list[tuple[str, int, dict[str, float]]]) -> list[Row]:
        """Choose what was not sent yet, and count it as sent."""
        rows = []
        for kind, step, values in messages:
            if step > self._sent.get(kind, -1):
                self._sent[kind] = step
                rows.append(Row(step, values))
        return rows

    def keep(self, run_id: str) -> None:
        """Write down what was sent."""
        self.run_id = run_id
        text = json.dumps({"id": run_id, "sent": self._sent}).encode()
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))

    def _lock(self) -> None:
        signal.alarm(_LEFT_S)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        signal.alarm(0)
