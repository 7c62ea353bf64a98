"""A file with lines for each step that stays correct whatever happens to the run.

Every worker knows the newest lines; one writes. If it is lost, another continues at the end of the
file. If steps are undone (the run goes back, or resumes from a checkpoint), their lines are cut; so
is a torn last line, which has no newline. A full disk or a read-only folder does not end the run:
it is reported, and every later line is tried again. Nothing is synced.

A line may be held back for a moment and written with those that follow it: between two steps every
cache is cold, and writing eight lines takes little longer than writing one. The writer first checks
that the file ends where it left it; if not, another worker has written, and it adds what the file
lacks.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from unisono.runtime.notices import say, shown
from unisono.runtime.plainfile import is_at, open_plain
from unisono.training.callbacks.callback import Callback, Fit

# Lines that a lost worker may not have written: those held back, and some more.
_KNOWN = 16
_HELD_AT_MOST, _HELD_S = 8, 0.1
_LOCK_TRIES, _LOCK_S = 100, 0.01
_BARRED_S = 1.0  # before checking again whether writing is allowed
_BLOCK_BYTES = 1 << 20
_NOWHERE = -1

# Returns a line's place in the run: its step, and a fraction that orders the lines of one step.
# None: the line belongs to no step and always stays.
PlaceOf = Callable[[bytes], float | None]
_Line = tuple[float, Callable[[], bytes]]


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
        self._known: deque[_Line] = deque(maxlen=_KNOWN)
        self._held: list[_Line] = []
        self._end = _NOWHERE  # the size of the file when this worker left it
        self._last = -1.0  # the place of its last line then
        self._wrote_at_s = 0.0
        self._barred_at_s = -math.inf
        self._has_complained = False

    def add(self, place: float, make: Callable[[], bytes], *, may_wait: bool = False) -> None:
        """Add a line. Every worker calls it, so that the next leader knows the line.

        `place`: where it belongs, above the place of the line before; `make` returns it, now or
        later; `may_wait`: hold it back, until the eighth, or the next after a tenth of a second.
        """
        writes = self._fit.is_leader
        if not writes:
            self.close()
        self._known.append((place, make))
        if writes:
            self._held.append((place, make))
            is_late = time.monotonic() - self._wrote_at_s >= _HELD_S
            if is_late or not may_wait or len(self._held) >= _HELD_AT_MOST:
                self.flush()

    def flush(self) -> None:
        """Write the lines that are held back."""
        if self._held:
            self._write(b"")

    def take_over(self) -> None:
        """Become the writer: write what the previous one may have left out."""
        self._write(b"")

    def note(self, line: bytes) -> None:
        """Add a line that belongs to no step, after all lines known here; any worker may."""
        is_mine = self._fd >= 0
        self._write(line)
        if not is_mine:
            self._close()

    def last(self) -> bytes:
        """Return the last whole line of the file; empty if there is none."""
        is_mine = self._fd >= 0
        if not is_mine and not (os.path.exists(self._path) and self._opens()):
            return b""
        try:
            return next((line for _, line in self._backwards() if line.endswith(b"\n")), b"")[:-1]
        except OSError as error:
            self._complain(error)
            return b""
        finally:
            if not is_mine:
                self._close()

    def cut(self, step: int) -> None:
        """Remove the lines of `step` and of all steps after it."""
        self._known = deque((one for one in self._known if one[0] < step), maxlen=_KNOWN)
        self._held = [one for one in self._held if one[0] < step]
        if self._fit.is_leader and os.path.exists(self._path):
            self._write(b"", but_cut_at=step)

    def set_aside(self) -> None:
        """Rename the file, if there is one, because another run begins; folders keep their name."""
        self.close()
        self._known.clear()
        path = self._path
        names = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(1))
        try:
            if path.is_file():
                path.rename(next(name for name in names if not name.exists()))
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        """Write the lines that are held back, and close the file."""
        self.flush()
        self._close()

    def _close(self) -> None:
        fd, self._fd, self._end = self._fd, -1, _NOWHERE
        if fd >= 0:
            os.close(fd)

    def _opens(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_plain(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self._complain(error)
        return self._fd >= 0

    def _write(self, line: bytes, but_cut_at: int | None = None) -> None:
        """Write the lines held back, or all that the file lacks, and then `line`."""
        held, self._held = self._held, []
        self._wrote_at_s = time.monotonic()
        if self._wrote_at_s - self._barred_at_s < _BARRED_S:
            return
        is_open = self._fd >= 0
        # A file that is where it was is also in the same folder.
        is_anew = is_open and not is_at(self._path, self._fd)
        if (is_anew or not is_open) and (trouble := trouble_at(self._fit, self._path)):
            self._barred_at_s = self._wrote_at_s
            self._complain(OSError(trouble.removesuffix(".")))
            return
        if is_anew:
            self._close()
            say_alone(
                self._fit,
                f"{shown(self._path, 1000)} was removed or replaced while it was written: "
                f"new lines go to a file of that name, without the earlier ones.",
            )
        if self._fd < 0 and not self._opens():
            return
        end, self._end = self._end, _NOWHERE
        try:
            with self._alone():
                size = os.fstat(self._fd).st_size
                if is_anew and size == 0:
                    self._append(self._anew(min([math.inf, *(place for place, _ in held)])))
                elif size != end:
                    self._last = self._place_of_last()
                    for place, make in self._known:
                        if place > self._last:
                            self._append(make())  # a line may depend on what is in the file
                            self._last = place
                # Another worker may have written one of these before.
                held = [one for one in held if one[0] > self._last]
                self._append(b"".join([make() for _, make in held]) + line)
                self._last = max([self._last, *(place for place, _ in held)])
                if but_cut_at is not None:
                    self._cut(but_cut_at)
                    self._last = min(self._last, math.nextafter(but_cut_at, -math.inf))
                self._end = os.fstat(self._fd).st_size
        except OSError as error:
            self._complain(error)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the file, without waiting long for a stopped worker that holds the lock."""
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_S)
            except OSError:
                break  # a file system without locks
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _backwards(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines from the last one on, with their offsets; the last may be torn."""
        begin, rest = os.fstat(self._fd).st_size, b""
        while begin:
            start = max(0, begin - _BLOCK_BYTES)
            lines = io.BytesIO(os.pread(self._fd, begin - start, start) + rest).readlines()
            begin, rest = start, b""
            if start and lines:
                rest = lines.pop(0)  # it may be the end of a longer one
            at = start + len(rest) + sum(map(len, lines))
            for line in reversed(lines):
                at -= len(line)
                yield at, line

    def _place_of_last(self) -> float:
        """Return the last place in the file; cut a torn line."""
        for at, line in self._backwards():
            if not line.endswith(b"\n"):
                os.ftruncate(self._fd, at)
            elif (place := self._place_of(line)) is not None:
                return place
        return -1.0

    def _cut(self, step: int) -> None:
        """Remove the lines that belong to `step` or come after it."""
        stay: list[bytes] = []
        first, num_stay = None, 0
        for at, line in self._backwards():
            place = self._place_of(line)
            if place is None:
                stay.append(line)
            elif place < step:
                break
            else:
                first, num_stay = at, len(stay)
        if first is not None:
            os.ftruncate(self._fd, first)
            self._append(b"".join(reversed(stay[:num_stay])))

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
