"""Python stacks of other processes: reads them with py-spy and shows the user's part of them.

A stack is a tuple of frames, the innermost first. ::

    load_image   train.py:88          your code: shown
    __getitem__  train.py:70          your code: shown
    _read_one    unisono/data/…       Unisono's, torch's, other libraries': folded into one line
    main         train.py:120         your code: shown

py-spy reads the memory of a process and needs nothing from it: the process may compute in C, be
stopped, or wait for a disk. Each look ends within two seconds, and a failure becomes part of the
explanation, never an error. Where Yama restricts who may read (``ptrace_scope`` is 1, as on
Ubuntu), each worker names its launcher with prctl(2); nobody else gains access.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from unisono.runtime.notices import shown
from unisono.runtime.procfs import read_stat

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
_LIBRARY = re.compile(r"/(site|dist)-packages/([^/]+)")
_PYTHONS_OWN = re.compile(r"/lib(?:64)?/python3\.\d+t?/|^<frozen ")
AT_THE_END = "_finish_as_python_does"
_STARTERS = ("unisono/runtime/launch/program.py", "unisono/runtime/launch/worker.py")
_ITEM_METHODS = ("__getitem__", "__getitems__")
_NUMBERS = re.compile(r"-?\d+|\[-?\d+(, -?\d+)*(, \.\.\.)?\]|\[(-?\d+, )+\.\.\.")


class Owner(enum.Enum):
    """Whose code a frame is; the value is the word for it."""

    USER = "yours"
    UNISONO = "Unisono"
    TORCH = "torch"
    LIBRARY = "other libraries"
    PYTHON = "Python"


@dataclass(frozen=True, slots=True)
class Frame:
    """One call that has not returned."""

    function: str  # its name, with that of its class where that is known
    file: str  # the path of its source, as Python knows it
    line: int  # the line that it is at
    # those of its arguments that the sampler could write out, by name and in order
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> Owner:
        """Whose code it is."""
        if self.file.startswith(_PACKAGE):
            return Owner.UNISONO
        if library := _LIBRARY.search(self.file):
            name = library[2]
            return {"torch": Owner.TORCH, "unisono": Owner.UNISONO}.get(name, Owner.LIBRARY)
        if _PYTHONS_OWN.search(self.file) or self.file in ("", "<string>", "<shim>"):
            return Owner.PYTHON
        return Owner.USER

    def is_in(self, *ends: str) -> bool:
        """Return whether its file's path ends in one of these."""
        return self.file.endswith(ends)

    @property
    def name(self) -> str:
        """The function's name without that of its class."""
        return self.function.rpartition(".")[2]

    @property
    def words(self) -> str:
        """Write it as ``` `load_image`, train.py:88 ```."""
        function = "the script" if self.function == "<module>" else f"`{shown(self.name)}`"
        return f"{function}, {shown(os.path.basename(self.file))}:{self.line}"


Stack = tuple[Frame, ...]


def _within_program(stack: Stack) -> Stack:
    """Leave out the frames that started the program, as far as one has been."""
    names = [frame.name for frame in stack]
    if AT_THE_END in names:
        return stack[: names.index(AT_THE_END) + 1]
    for count, frame in enumerate(stack):
        if frame.is_in(*_STARTERS):
            return stack[:count] or stack
    return stack


def own_place(stack: Stack) -> Frame | None:
    """Find the innermost frame of the user's, or else the innermost that tells most; or None."""
    for owners in ((Owner.USER,), (Owner.LIBRARY,), tuple(Owner)):
        for frame in stack:
            if frame.owner in owners:
                return frame
    return None


def sample_in(stack: Stack) -> str:
    """Name the sample that a dataset is being asked for, such as ``10432``; empty if none is."""
    for frame in stack:
        if frame.name in _ITEM_METHODS and frame.owner is not Owner.TORCH:
            for name, text in frame.arguments.items():
                if name != "self" and _NUMBERS.fullmatch(text):
                    return text.strip("[]")
    return ""


def folded(stack: Stack, folder: str) -> Iterator[str]:
    """Write the user's frames, with paths from `folder`, and how many others are between them."""
    if stack and all(frame.owner is not Owner.USER for frame in stack):
        yield from (_line(frame, folder) for frame in stack[:6])
        stack = stack[6:]
    for is_users, group in groupby(stack, lambda frame: frame.owner is Owner.USER):
        frames = list(group)
        if is_users:
            yield from (_line(frame, folder) for frame in frames)
        else:
            owners = ", ".join(o.value for o in Owner if o in {frame.owner for frame in frames})
            yield f"({len(frames)} frame{'s' * (len(frames) > 1)} of {owners})"


def _line(frame: Frame, folder: str) -> str:
    path = frame.file
    if folder and path.startswith(folder.rstrip("/") + "/"):
        path = os.path.relpath(path, folder)
    return f"{shown(frame.function)}  {shown(path)}:{frame.line}"


TIMEOUT_S = 1.5
_TRIES = 3  # a stack that changes while it is read may make no sense


@dataclass(frozen=True, slots=True)
class Sample:
    """A look at one process."""

    stack: Stack = ()  # of its first thread, the innermost frame first
    trouble: str = ""  # why there is none; else empty


def sample(pids: Collection[int], timeout_s: float = TIMEOUT_S) -> dict[int, Sample]:
    """Read the stacks of some processes, all at the same time."""
    until_s = time.monotonic() + timeout_s
    found = {pid: Sample(trouble="nobody has looked") for pid in pids}
    for _ in range(_TRIES):
        wanted = [pid for pid, one in found.items() if one.trouble]
        if wanted and time.monotonic() < until_s:
            found.update(_sample_once(wanted, until_s))
    return found


def _sample_once(pids: Collection[int], until_s: float) -> dict[int, Sample]:
    beside = shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    command = [beside or "py-spy", "dump", "--nonblocking", "--locals", "--json", "--pid"]
    started: dict[int, subprocess.Popen[bytes]] = {}
    found: dict[int, Sample] = {}
    for pid in pids:
        try:
            started[pid] = subprocess.Popen(
                [*command, str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is not for it
            )
        except OSError as error:
            found[pid] = Sample(trouble=f"py-spy cannot be started ({error.strerror})")
    for pid, process in started.items():
        found[pid] = _outcome(process, pid, until_s)
    return found


def _outcome(process: subprocess.Popen[bytes], pid: int, until_s: float) -> Sample:
    try:
        out, said = process.communicate(timeout=max(0.01, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.2)
        return Sample(trouble="py-spy did not answer in time")
    if process.returncode:
        return Sample(trouble=_reason(said.decode(errors="replace")))
    try:
        return Sample(read_dump(json.loads(out), pid))
    except (ValueError, KeyError, TypeError):
        return Sample(trouble="what py-spy has written makes no sense")


def read_dump(dump: Sequence[Mapping[str, Any]], pid: int) -> Stack:
    """Read the stack of a process's first thread from what py-spy has written as JSON."""
    for thread in dump:
        # A fork that Python has not seen keeps the numbers of the process before.
        if thread["os_thread_id"] == pid or len(dump) == 1:
            return _within_program(tuple(map(_read_frame, thread["frames"])))
    raise ValueError(f"no stack of thread {pid}")


def _read_frame(given: Mapping[str, Any]) -> Frame:
    local = given.get("locals") or ()
    arguments = {str(v["name"]): str(v["repr"]) for v in local if v.get("arg") and v.get("repr")}
    return Frame(str(given["name"]), str(given["filename"]), int(given["line"]), arguments)


def _reason(said: str) -> str:
    """Take the reason from what py-spy says, which is followed by a trace of its own stack."""
    if "ermission denied" in said or "not permitted" in said:
        return "the kernel does not let you read that process's memory: ask as root"
    first = said.strip().partition("\n")[0].removeprefix("Error: ")
    return f"py-spy says: {first or 'nothing'}"


_PR_SET_PTRACER = 0x59616D61


def let_launcher_look(server_pid: int) -> None:
    """Let the launcher, `server_pid`'s parent, look into this process and its forks."""
    if (server := read_stat(server_pid)) is not None:
        allow = partial(ctypes.CDLL(None).prctl, _PR_SET_PTRACER, server.parent, 0, 0, 0)
        allow()
        os.register_at_fork(after_in_child=allow)
