"""The records of one process, as lines of a file, and the program's copy of the working folder.

Nothing here may disturb the program: what cannot be recorded is left out. In the copy, large files
and folders that programs do not write to are links. Before a program writes to a linked file, the
link is replaced by a copy; before it writes into a linked folder, by a folder of links.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, final

import safetensors.torch
import torch

from unisono.tools.verify.trace import Bits, Note, Place, line_of

_POLL_S = 0.01
_OTHERS_AT_MOST_S = 20.0
_GIVEN_AT_MOST = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a program is run, and what is recorded; the same for every rank."""

    steps: int = 24  # steps of an optimizer after which the program stops
    batches: int = 8  # number of batches to which a loader's iteration is cut
    full_steps: int = 12  # steps whose gradients are kept
    # record the bits of every step, and leave the program's random numbers alone
    replays: bool = False
    timing_s: float = 0.0  # how long to time steps, for `unisono plan`
    timeout_s: float = 300.0  # when a run is ended
    module: str = "unisono.tools.verify.observed"  # what runs the program in each process
    threads: int = 1  # of each rank
    folder: str = ""  # for the files of this run
    feed: str = ""  # file with the samples of another run; empty: read them


@final
@dataclass
class Recorder:
    """The state that all hooks of a process share."""

    options: Limits
    rank: int
    world_size: int
    # the newest batches: loader, iteration and batch, and hashes of what they consist of
    given: list[tuple[Place, set[str]]] = field(default_factory=list)
    is_between: bool = True  # the newest iteration of a loader has ended
    num_steps: int = 0  # of all optimizers
    is_exact: bool = False  # the program trains with Unisono; the hooks for other programs are off
    pid: int = field(default_factory=os.getpid)
    handles: list[Any] = field(default_factory=list)  # of torch's hooks, removed with the others
    at_end: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = Path(self.options.folder, f"rank{self.rank}.jsonl")
        self._records = open(path, "a", buffering=1)  # noqa: SIM115  # until the process ends

    def write(self, record: Any) -> None:
        """Record one of the values of :mod:`unisono.tools.verify.trace`."""
        if os.getpid() == self.pid:
            self._records.write(line_of(record))

    def write_bits(self, bits: Mapping[str, Mapping[str, str]], place: int | None = None) -> None:
        """Record digests of the present step, by kind, of a shard or of this rank."""
        place = self.rank if place is None else place
        for kind, digests in bits.items():
            self.write(Bits(self.num_steps, kind, place, digests))

    def count_step(self, of_optimizer: int | None = None) -> None:
        """Count a step; leave the program after the last one, of any optimizer if they have one."""
        self.num_steps += 1
        if (self.num_steps if of_optimizer is None else of_optimizer) >= self.options.steps:
            self.stop()

    def train_with_unisono(self) -> None:
        """Remove the hooks for other programs."""
        if not self.is_exact:
            self.is_exact = True
            self.write(Note("unisono"))
            for handle in self.handles:
                handle.remove()

    def record_batch(self, at: Place, rows: set[str]) -> None:
        """Record that the program gets a batch; several are kept, as libraries read ahead."""
        self.given = [*self.given[1 - _GIVEN_AT_MOST :], (at, rows)]
        self.is_between = False

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Record errors of the recording, and let the program continue."""
        try:
            yield
        except Exception:
            self.write(Note("trouble", traceback.format_exc()))

    def end(self, how: str) -> None:
        """Record how the program ended, and what the hooks record last."""
        if os.getpid() != self.pid:
            return
        for act in self.at_end:
            with self.guarded():
                act()
        self.write(Note("end", how))
        self._done_path(self.rank).touch()

    def stop(self) -> NoReturn:
        """Leave the program once all ranks have come as far, lest a sum break. Collective."""
        self.end("stopped")
        deadline_s = time.monotonic() + _OTHERS_AT_MOST_S
        others = [self._done_path(rank) for rank in range(self.world_size)]
        while time.monotonic() < deadline_s and not all(path.exists() for path in others):
            time.sleep(_POLL_S)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)

    def _done_path(self, rank: int) -> Path:
        return Path(self.options.folder) / f"rank{rank}.done"


def wrap(owner: Any, name: str, around: Callable[..., Any], *also: Any) -> None:
    """Replace a function by `around`, which gets the function before its arguments.

    `also` are other modules that have the same function under that name.
    """
    before = getattr(owner, name)

    @functools.wraps(before)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(before, *args, **kwargs)

    for place in (owner, *also):
        setattr(place, name, wrapped)


def observe(recorder: Recorder, owner: Any, name: str, see: Callable[..., None]) -> None:
    """Call `see` before a function, with its arguments, unless Unisono trains."""

    def around(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_exact and not torch.compiler.is_compiling():
            with recorder.guarded():
                see(*args, **kwargs)
        return before(*args, **kwargs)

    wrap(owner, name, around)


COPIED_AT_MOST_BYTES = 16 << 20
ENTRIES_AT_MOST = 20_000
_LINKED = frozenset({".git", ".hg", ".venv", "venv", "env", "node_modules", "__pycache__"})


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder: small files as copies, everything else as links."""
    num_left = ENTRIES_AT_MOST
    for here, folders, files in os.walk(source):
        there, walked = target / Path(here).relative_to(source), []
        there.mkdir()
        for name in (*folders, *files):
            num_left -= 1
            original = Path(here, name)
            if original in (target, target.parent):
                continue
            is_linked = original.is_symlink() or name in _LINKED or num_left <= 0
            if name in folders and not is_linked and not (original / "pyvenv.cfg").exists():
                walked.append(name)
            else:
                _copy_or_link(original, there / name, may_copy=num_left > 0)
        folders[:] = walked


def _copy_or_link(original: Path, place: Path, *, may_copy: bool) -> None:
    with _left_out_if_refused(place):
        facts = original.stat()
        if may_copy and stat.S_ISREG(facts.st_mode) and facts.st_size <= COPIED_AT_MOST_BYTES:
            shutil.copy2(original, place)
            return
    with _left_out_if_refused(place):
        place.symlink_to(os.path.realpath(original))


@contextlib.contextmanager
def _left_out_if_refused(place: Path) -> Iterator[None]:
    """Remove what the system refuses to finish; raise if the reason is that there is no room."""
    try:
        yield
    except OSError as error:
        place.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(error.errno, error.strerror, str(place)) from None


# The paths in the arguments of audit events. What the path itself names may be changed:
_WRITING = {
    "os.chdir": slice(1),  # lest relative paths be outside of the copy
    "os.chmod": slice(1),
    "os.chown": slice(1),
    "os.link": slice(2),
    "os.mkdir": slice(1),  # even if it exists: the program will write into it, perhaps natively
    "os.removexattr": slice(1),
    "os.rmdir": slice(1),
    "os.setxattr": slice(1),
    "os.truncate": slice(1),
    "os.utime": slice(1),
    "shutil.rmtree": slice(1),
    "sqlite3.connect": slice(1),
}
# Only the folder that it is in is changed:
_MOVING = {"os.remove": slice(1), "os.rename": slice(2), "os.symlink": slice(1, 2)}
_OPENS_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def copy_before_writing(folder: str) -> None:
    """Make this process replace links in `folder` before it writes to what they lead to.

    Python reports each file that it opens, but not those that torch and safetensors write natively.
    """
    own = threading.local()  # whether this thread is replacing a link

    def replace(path: Any, *, with_itself: bool = True) -> None:
        if isinstance(path, str | bytes | os.PathLike) and not hasattr(own, "is_busy"):
            own.is_busy = True
            try:
                replace_links(folder, os.fsdecode(path), with_itself=with_itself)
            finally:
                del own.is_busy

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & _OPENS_TO_WRITE:
            replace(args[0])
        elif event in _WRITING or event in _MOVING:
            for path in args[_WRITING.get(event) or _MOVING[event]]:
                replace(path, with_itself=event in _WRITING)

    def save(before: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        for f in (*args[1:2], kwargs.get("f"), kwargs.get("filename")):
            replace(f)
        before(*args, **kwargs)

    sys.addaudithook(audit)
    wrap(torch, "save", save, torch.serialization)
    wrap(torch.jit, "save", save)
    wrap(safetensors.torch, "save_file", save)


def replace_links(folder: str, path: str, *, with_itself: bool = True) -> None:
    """Replace the links out of `folder` on the way to a path: a file by a copy, a folder by links.

    `with_itself` also replaces the path itself, if it is such a link. Other ranks wait meanwhile.
    """
    here = os.sep
    path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    parts = [part for part in path.split(os.sep) if part not in ("", ".")]
    with _locked(f"{folder}.lock"):
        for number, part in enumerate(parts, 1):
            here = os.path.dirname(here) if part == ".." else os.path.join(here, part)
            if os.path.islink(here) and (with_itself or number < len(parts)):
                original = os.path.realpath(here)
                if _is_in(folder, here) and not _is_in(folder, original):
                    _replace_link(here, original, os.path.dirname(folder))
                else:
                    here = original


def _is_in(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has it as well
    finally:
        os.close(fd)


def _replace_link(place: str, original: str, beside: str) -> None:
    """Replace a link, so that a failure leaves the link: the program then does not write."""
    with tempfile.TemporaryDirectory(dir=beside) as temporary:
        new = os.path.join(temporary, "new")
        if os.path.isdir(original):
            os.mkdir(new)
            for name in os.listdir(original):
                os.symlink(os.path.join(original, name), os.path.join(new, name))
            os.unlink(place)
            os.rename(new, place)
        elif os.path.isfile(original):
            shutil.copy2(original, new)
            os.replace(new, place)
        elif not os.path.exists(original):
            os.unlink(place)
