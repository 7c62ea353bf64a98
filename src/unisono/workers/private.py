"""Where can the processes of one user announce themselves? In a folder that only they can use.

It is ``unisono-<uid>`` in XDG_RUNTIME_DIR, or in the folder for temporary files if that is not set.
A folder that others can read or write is refused, and no link is followed.

An announcement is a file, *held* by a lock that the kernel releases when its process ends. A file
that nobody holds is left over: it is ignored, and the next process that announces itself removes
it. Invariant: files come and go while the folder itself is locked, except that whoever holds a file
may remove it at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unisono.errors import RendezvousError

_WORD_BYTES_AT_MOST = 4096
_LOOK_EVERY_S = 0.005
_LOCKED_AT_MOST_S = 10.0


@dataclass(frozen=True, slots=True)
class Word:
    """An announcement."""

    text: str  # what it says
    is_held: bool  # whether its process still runs and has not withdrawn it


class PrivateFolder:
    """The folder, open. Final; made by :meth:`open`."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def open(cls, environ: Mapping[str, str] | None = None) -> PrivateFolder:
        """Open this user's folder; make it if it is not there.

        Args:
            environ: where XDG_RUNTIME_DIR is looked up; the process's own by default.

        Raises:
            RendezvousError: it cannot be made, or others could write there.
        """
        environ = os.environ if environ is None else environ
        runtime = environ.get("XDG_RUNTIME_DIR", "")
        base = runtime if os.path.isdir(runtime) else tempfile.gettempdir()
        path = os.path.join(base, f"unisono-{os.geteuid()}")
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise RendezvousError(
                f"workers that find each other must have a folder of their own at {path}, but "
                f"that fails with: {error}. Set XDG_RUNTIME_DIR to a folder that you may write to, "
                f"the same for all of them."
            ) from error
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(fd)
            raise RendezvousError(
                f"{path} must be a folder of user {os.geteuid()} that nobody else can use, but "
                f"belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}: "
                f"remove it, or set XDG_RUNTIME_DIR to a folder of your own."
            )
        return cls(path, fd)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)

    def read(self, name: str) -> Word | None:
        """Read what is announced under a name; None if nothing is."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        try:
            text = os.read(fd, _WORD_BYTES_AT_MOST).decode(errors="replace")
            return Word(text, is_held=not _lock(fd, fcntl.LOCK_SH))
        finally:
            os.close(fd)

    def leave(self, name: str, text: str) -> int | None:
        """Announce something under a name, whole or not at all; removes what is left over.

        Returns:
            A descriptor that holds it until it is closed; None if somebody else holds that name.

        Raises:
            RendezvousError: the folder stays locked by somebody else.
        """
        with locked(self._fd, self.path):
            self._sweep()
            if (there := self.read(name)) is not None and there.is_held:
                return None
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(f"{name}.new", flags, 0o600, dir_fd=self._fd)
            try:
                is_mine = _lock(fd, fcntl.LOCK_EX)
                assert is_mine, "nobody else looks at a file while the folder is locked"
                os.write(fd, text.encode())
                os.replace(f"{name}.new", name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except BaseException:
                os.close(fd)
                raise
            return fd

    def take_back(self, name: str, fd: int) -> None:
        """Remove what this process holds."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)
        os.close(fd)

    def _sweep(self) -> None:
        for name in os.listdir(self._fd):
            with contextlib.suppress(OSError):
                word = self.read(name)
                if word is not None and not word.is_held:
                    os.unlink(name, dir_fd=self._fd)


@contextlib.contextmanager
def locked(fd: int, what: str) -> Iterator[None]:
    """Have what is open as `fd` for oneself; others wait, but not for ever.

    Args:
        fd: of an opening that this process shares with nobody.
        what: its name, for the error.

    Raises:
        RendezvousError: somebody else keeps it, who was stopped in the midst.
    """
    deadline = time.monotonic() + _LOCKED_AT_MOST_S
    while not _lock(fd, fcntl.LOCK_EX):
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"{what} must be free within {_LOCKED_AT_MOST_S:.0f} s, but another process keeps "
                f"it locked: look for a stopped process of the same user."
            )
        time.sleep(_LOOK_EVERY_S)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
