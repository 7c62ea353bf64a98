"""A file with lines for each step, to which one worker appends: each line once, in order.

Every worker knows the newest lines; the leader writes them. If it is lost, the next leader looks at
the end of the file and continues there. Nothing that was written is undone: if the run goes back,
the repeated steps have the same results, and their lines are there already. Only a run that resumes
from before the end of its file begins a new file, with the lines that stay. A full disk or a
read-only folder does not end the run: it is reported, and later lines are tried again. Nothing is
synced.

A line may be held back for a moment and written with those that follow it: between two steps every
cache is cold, and writing eight lines takes little longer than writing one.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import final

from unisono.runtime.notices import say, shown
from unisono.runtime.plainfile import is_at, open_plain, written_whole
from unisono.training.callbacks.callback import Callback, Fit

# Lines that a lost worker may not have written: those held back, and some more.
_KNOWN = 16
_HELD_AT_MOST, _HELD_S = 8, 0.1
_BARRED_S = 1.0  # before checking again whether writing is allowed
_TAIL_BYTES = 1 << 16

# Returns a line's place in the run: its step, and a fraction that orders the lines of one step.
# None: the line belongs to no step and always stays.
PlaceOf = Callable[[bytes], float | None]


@final
class Journal:
    """One file; the leader writes it, and creates it and its folder with the first line.

    Lines for which `place_of` returns a place ascend. `anew` returns the first lines of a file that
    replaces one removed while it was written, given the next line's place.
    """

    def __init__(
        self,
        path: Path,
        place_of: PlaceOf,
        fit: Fit,
        *,
        anew: Callable[[float], bytes] = lambda place: b"",
    ) -> None:
        self._path, self._place_of, self._fit, self._anew = path, place_of, fit, anew
        self._fd = -1
        # Lines that may not be in the file yet.
        self._known: deque[tuple[float, Callable[[], bytes]]] = deque(maxlen=_KNOWN)
        self._last = -1.0  # the last place in the file, once this worker is its writer
        self._wrote_at_s = 0.0
        self._barred_at_s = -math.inf
        self._has_complained = False

    def begin(self, step: int) -> None:
        """Continue the file at `step`, without lines of that step and of those after it.

        At step 0 another run begins, and the file is renamed; folders keep their name.
        """
        try:
            if step == 0 and self._path.is_file():
                names = (self._path.with_stem(f"{self._path.stem}-{n}") for n in itertools.count(1))
                self._path.rename(next(name for name in names if not name.exists()))
            elif step > 0 and self._path.exists() and self._opens():
                self._leave_out(step)
        except OSError as error:
            self._complain(error)
        self._close()

    def add(self, place: float, make: Callable[[], bytes], *, may_wait: bool = False) -> None:
        """Add a line, unless it is there. Every worker calls it, as any may be the next leader.

        `place`: where it belongs, above the place of the line before, except in a repeated step;
        `make` returns it, now or later; `may_wait`: hold it back, until the eighth, or the next
        after a tenth of a second.
        """
        self._known.append((place, make))
        is_late = time.monotonic() - self._wrote_at_s >= _HELD_S
        if is_late or not may_wait or len(self._known) >= _HELD_AT_MOST:
            self.flush()

    def flush(self) -> None:
        """On the leader: write the lines that are held back, or that a lost leader held back."""
        if self._fit.is_leader:
            self._write(b"")
        else:
            self._close()

    def note(self, line: bytes) -> None:
        """Add a line that belongs to no step; any worker may."""
        self._write(line)
        if not self._fit.is_leader:
            self._close()

    def last_note(self) -> bytes:
        """Return the last whole line of the file; empty if it belongs to a step, or if none is."""
        notes: list[bytes] = []
        is_writer = self._fd >= 0
        try:
            if is_writer or (self._path.exists() and self._opens()):
                _, _, notes = self._tail()
        except OSError as error:
            self._complain(error)
        if not is_writer:
            self._close()
        return notes[-1] if notes else b""

    def close(self) -> None:
        """Write the lines that are held back, and close the file."""
        self.flush()
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _opens(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_plain(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self._complain(error)
        return self._fd >= 0

    def _write(self, note: bytes) -> None:
        """Append what the file lacks, if this worker is the leader, and then a note."""
        self._wrote_at_s = time.monotonic()
        if self._wrote_at_s - self._barred_at_s < _BARRED_S:
            return
        # A file that is where it was is also in the same folder.
        is_there = self._fd >= 0 and is_at(self._path, self._fd)
        if not is_there and (trouble := trouble_at(self._fit, self._path)):
            self._barred_at_s = self._wrote_at_s
            self._complain(OSError(trouble.removesuffix(".")))
            return
        is_anew = self._fd >= 0 and not is_there
        if is_anew and self._is_anothers():
            self._close()
            self._barred_at_s = math.inf
            self._complain(OSError("another run has begun it meanwhile"))
            return
        if is_anew:
            self._close()
            say_alone(
                self._fit,
                f"{shown(self._path, 1000)} was removed or replaced while it was written: "
                f"new lines go to a file of that name, without the earlier ones.",
            )
        if not is_there and not self._opens():
            return
        try:
            if not self._fit.is_leader:
                self._append(note)
                return
            if not is_there:
                self._take_over()
            if is_anew and os.fstat(self._fd).st_size == 0:
                self._append(self._anew(min([math.inf, *(place for place, _ in self._known)])))
            lines, last = [], self._last
            for place, make in self._known:
                if place > last:
                    lines.append(make())
                    last = place
            self._append(b"".join([*lines, note]))
            self._last = last
            self._known.clear()
        except OSError as error:
            self._close()
            self._complain(error)

    def _is_anothers(self) -> bool:
        """Return whether the file that has replaced this one begins with other lines."""
        try:
            with os.fdopen(open_plain(self._path, os.O_RDONLY), "rb") as file:
                begin = file.read(_TAIL_BYTES)
        except OSError:
            return False
        return begin != os.pread(self._fd, len(begin), 0)

    def _take_over(self) -> None:
        """Continue where the file ends, without the half of a line that a lost leader may leave."""
        end, self._last, notes = self._tail()
        end += sum(map(len, notes))
        if end < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, end)

    def _tail(self, below: float = math.inf) -> tuple[int, float, list[bytes]]:
        """Return where the last line of a place below `below` ends, its place, and what follows.

        What follows are whole lines. Without such a line, the place is -1, and all lines follow.
        """
        size, num_bytes = os.fstat(self._fd).st_size, _TAIL_BYTES
        while True:
            begin = max(0, size - num_bytes)
            with open(self._fd, "rb", closefd=False) as file:
                file.seek(begin)
                lines = file.readlines()
            if lines and not lines[-1].endswith(b"\n"):
                lines.pop()
            at = begin
            if begin and lines:
                at += len(lines.pop(0))  # it may be the end of a longer one
            for number in reversed(range(len(lines))):
                place = self._place_of(lines[number])
                if place is not None and place < below:
                    return at + sum(map(len, lines[: number + 1])), place, lines[number + 1 :]
            if not begin:
                return 0, -1.0, lines
            num_bytes *= 8

    def _leave_out(self, step: int) -> None:
        """Replace the file by one without the lines of `step` and of those after it."""
        end, _, lines = self._tail(below=step)
        notes = [line for line in lines if self._place_of(line) is None]
        if len(notes) == len(lines):
            return
        with written_whole(self._path) as file:
            done = 0
            while done < end:
                done += os.sendfile(file.fileno(), self._fd, done, end - done)
            file.writelines(notes)

    def _append(self, data: bytes) -> None:
        if not data:
            return
        written = os.write(self._fd, data)
        if written < len(data):
            # Half a line is worse than none: the next one would be appended to it.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            say_alone(
                self._fit,
                f"{shown(self._path, 1000)} must be writable, but is not "
                f"({error.strerror or error}): it lacks lines; training continues.",
            )


def path_of(callback: Callback, fit: Fit, what: str, example: str) -> Path:
    """Return where a callback writes, even if the working directory changes during ``fit``."""
    path = callback.writes_to(fit.directory)
    if path is None:
        raise ValueError(
            f"`path` must say where {what} if the run has no directory, but is None: pass "
            f"`{example}`, or `directory=` to the trainer."
        )
    return path.absolute()


def trouble_at(fit: Fit, path: Path) -> str:
    """Return why nothing may be written at a path; empty if writing is allowed.

    The run directory may have become another job's. If it was only removed, it is locked again.
    """
    if fit.directory is None or not path.is_relative_to(fit.directory):
        return ""
    return fit.check_directory()


def say_alone(fit: Fit, line: str) -> None:
    """Print a line that only this worker knows.

    ``fit.say`` shows what the first worker says. Once rank 0 was lost and replaced, the leader is
    another worker; its line then goes to standard error, beside the progress bar.
    """
    if fit.is_first:
        fit.say(line)
    else:
        say(line)
