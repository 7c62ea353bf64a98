"""Where does the output of workers go? To where the caller's own ``print`` goes.

    sys.stdout is descriptor 1:      worker ──────────────────► descriptor 1
    it is something else             worker ──pipe──► launcher ──► sys.stdout.write
    (a cell, pytest, a StringIO):

The launcher reads the pipes in the thread that called ``launch``, so that a notebook shows the text
below the cell that called it. Each worker has its own pipes. Whole lines are written at once, so
that lines of different workers do not mix.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import TextIO, final

from unisono.runtime.launch.cell import Cell, DisplayState, in_notebook
from unisono.runtime.workers.launcher_messages import ShowProgress

_PIPE_BYTES = 1 << 20  # the capacity of a pipe at most, with pages of 64 KiB
_UNFINISHED_S = 0.1  # an unfinished line is shown after this time


@final
class LineBuffer:
    """Splits the bytes of one stream into lines; replaces undecodable bytes by a marker."""

    def __init__(self, encoding: str) -> None:
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._text = ""
        self._since_s = 0.0

    def feed(self, data: bytes, now_s: float) -> str:
        """Add bytes that arrived at `now_s`, and return the complete lines."""
        text = self._text + self._decoder.decode(data)
        # A carriage return ends a line too: progress bars overwrite their line.
        end = max(text.rfind("\n"), text.rfind("\r")) + 1
        if end or not self._text:
            # Otherwise its age counts from its beginning: a growing line is shown as well.
            self._since_s = now_s
        self._text = text[end:]
        return text[:end]

    @property
    def due_s(self) -> float:
        """When to show the unfinished line; infinity if there is none."""
        return self._since_s + _UNFINISHED_S if self._text else math.inf

    def take(self, *, final: bool = False) -> str:
        """Return the unfinished line; `final`: at the end of the stream."""
        text, self._text = self._text + self._decoder.decode(b"", final=final), ""
        return text


@final
class OutputStream:
    """A stream of the caller.

    If it raises an exception, the job continues without this output, which is reported once.
    """

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name, self._stream = name, stream
        self._is_reported = False

    def write(self, text: str) -> None:
        """Write text that workers have printed."""
        with self._failures_reported():
            if text:
                self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream, so that a notebook shows the text below this cell."""
        with self._failures_reported():
            self._stream.flush()

    @contextlib.contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # The process's own stderr may be gone as well.
            with contextlib.suppress(Exception):
                if not self._is_reported:
                    print(
                        f"unisono: {self._name} must take what workers print, but its `write` or "
                        f"`flush` has raised {type(error).__name__}: {error}. The job continues, "
                        f"but their output is lost until {self._name} can be written again.",
                        file=sys.__stderr__,
                        flush=True,
                    )
            self._is_reported = True


@final
class Outputs:
    """The output of one job's workers; readable when :meth:`pump` has something to write."""

    def __init__(self) -> None:
        self._targets: list[OutputStream | None] = [
            None if _leads_to(stream, fd) else OutputStream(name, stream)
            for fd, name, stream in ((1, "sys.stdout", sys.stdout), (2, "sys.stderr", sys.stderr))
        ]
        for stream in (sys.stdout, sys.stderr):
            # The next print, or Python at exit, reports a failure.
            with contextlib.suppress(Exception):
                stream.flush()
        self._cell = Cell() if in_notebook() else None
        self._pipes: dict[int, tuple[OutputStream, LineBuffer]] = {}
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Return a descriptor that is readable once workers have written something."""
        return self._epoll.fileno()

    def standard_fds(self) -> list[int]:
        """Open descriptors 0, 1 and 2 of one worker, close-on-exec; the caller closes them."""
        fds = [os.dup(0)]
        for fd, target in zip((1, 2), self._targets, strict=True):
            fds.append(os.dup(fd) if target is None else self._pipe_to(target))
        return fds

    @property
    def due_s(self) -> float:
        """When to call :meth:`pump` even without new output, as a ``time.monotonic`` value."""
        return min((buffer.due_s for _, buffer in self._pipes.values()), default=math.inf)

    def pump(self) -> None:
        """Write what workers have printed so far, without waiting for more."""
        for fd, _ in self._epoll.poll(0):
            self._read(fd)
        now_s = time.monotonic()
        for target, buffer in self._pipes.values():
            if buffer.due_s <= now_s:
                target.write(buffer.take())

    def show(self, progress: ShowProgress) -> None:
        """Draw a worker's progress, below its earlier output."""
        self.pump()
        if self._cell is not None:
            # A front end that has disconnected must not end a job.
            with contextlib.suppress(Exception):
                self._cell.draw(DisplayState(**progress.state))

    def close(self) -> None:
        """Write what is left and close the pipes, even those of programs that outlive workers."""
        self.pump()
        for fd in list(self._pipes):
            self._close(fd)
        self._epoll.close()
        for target in self._targets:
            if target is not None:
                target.flush()

    def _pipe_to(self, target: OutputStream) -> int:
        reading, writing = os.pipe()
        # Workers print in the encoding that this process started with.
        encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"
        self._pipes[reading] = target, LineBuffer(encoding)
        self._epoll.register(reading, select.EPOLLIN)
        return writing

    def _read(self, fd: int) -> None:
        target, buffer = self._pipes[fd]
        if data := os.read(fd, _PIPE_BYTES):
            target.write(buffer.feed(data, time.monotonic()))
        else:
            self._close(fd)

    def _close(self, fd: int) -> None:
        target, buffer = self._pipes.pop(fd)
        self._epoll.unregister(fd)
        os.close(fd)
        target.write(buffer.take(final=True))


def _leads_to(stream: TextIO, fd: int) -> bool:
    try:
        return os.path.sameopenfile(stream.fileno(), fd)
    except Exception:
        return False  # no descriptor; the program's replacement of a stream may do anything
