"""Python stacks of other processes: read with py-spy, reduced to the user's frames.

A stack is a tuple of frames, the innermost first. ::

    load_image   train.py:88          your code: shown
    __getitem__  train.py:70          your code: shown
    _read_one    unisono/data/…       Unisono, torch, other libraries: folded into one line
    main         train.py:120         your code: shown

py-spy reads the memory of a process without its help: the process may compute in C, be stopped, or
wait for a disk. Each inspection ends within two seconds, and a failure becomes part of the
explanation, never an error. Where Yama restricts reading (``ptrace_scope`` is 1, as on Ubuntu),
each worker permits its launcher with prctl(2); no other process gains access.
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
    """The owner of a frame's code; the value is used in messages."""

    USER = "yours"
    UNISONO = "Unisono"
    TORCH = "torch"
    LIBRARY = "other libraries"
    PYTHON = "Python"


@dataclass(frozen=True, slots=True)
class Frame:
    """One call that has not returned."""

    function: str  # its name, including that of its class if known
    file: str  # the path of its source, as Python knows it
    line: int  # its current line
    # those of its arguments that py-spy could print, by name and in order
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> Owner:
        """The owner of the frame's code."""
        if self.file.startswith(_PACKAGE):
            return Owner.UNISONO
        if library := _LIBRARY.search(self.file):
            name = library[2]
            return {"torch": Owner.TORCH, "unisono": Owner.UNISONO}.get(name, Owner.LIBRARY)
        if _PYTHONS_OWN.search(self.file) or self.file in ("", "<string>", "<shim>"):
            return Owner.PYTHON
        return Owner.USER

    def is_in(self, *ends: str) -> bool:
        """Return whether the path of its file ends with one of these."""
        return self.file.endswith(ends)

    @property
    def name(self) -> str:
        """The function's name without that of its class."""
        return self.function.rpartition(".")[2]

    @property
    def words(self) -> str:
        """The frame as ``` `load_image`, train.py:88 ```."""
        function = "the script" if self.function == "<module>" else f"`{shown(self.name)}`"
        return f"{function}, {shown(os.path.basename(self.file))}:{self.line}"


Stack = tuple[Frame, ...]


def _within_program(stack: Stack) -> Stack:
    """Remove the frames that started the program, if it has been started."""
    names = [frame.name for frame in stack]
    if AT_THE_END in names:
        return stack[: names.index(AT_THE_END) + 1]
    for count, frame in enumerate(stack):
        if frame.is_in(*_STARTERS):
            return stack[:count] or stack
    return stack


def user_frame(stack: Stack) -> Frame | None:
    """Return the user's innermost frame, or else the most informative one; None without frames."""
    for owners in ((Owner.USER,), (Owner.LIBRARY,), tuple(Owner)):
        for frame in stack:
            if frame.owner in owners:
                return frame
    return None


def sample_in(stack: Stack) -> str:
    """Return the index of the sample being loaded, such as ``10432``; empty if there is none."""
    for frame in stack:
        if frame.name in _ITEM_METHODS and frame.owner is not Owner.TORCH:
            for name, text in frame.arguments.items():
                if name != "self" and _NUMBERS.fullmatch(text):
                    return text.strip("[]")
    return ""


def folded(stack: Stack, folder: str) -> Iterator[str]:
    """Yield the user's frames, with paths from `folder`, and the number of others in between."""
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
_TRIES = 3  # a stack that changes while it is read may be invalid


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of inspecting one process."""

    stack: Stack = ()  # of its first thread, the innermost frame first
    trouble: str = ""  # why there is no stack; empty if there is one


def sample(pids: Collection[int], timeout_s: float = TIMEOUT_S) -> dict[int, Sample]:
    """Return the stacks of some processes, read at the same time."""
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
                start_new_session=True,  # Ctrl-C must not reach it
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
        return Sample(trouble="py-spy's output is invalid")


def read_dump(dump: Sequence[Mapping[str, Any]], pid: int) -> Stack:
    """Return the stack of a process's first thread from py-spy's JSON."""
    for thread in dump:
        # In a fork that Python has not noticed, thread IDs are those of the parent.
        if thread["os_thread_id"] == pid or len(dump) == 1:
            return _within_program(tuple(map(_read_frame, thread["frames"])))
    raise ValueError(f"no stack of thread {pid}")


def _read_frame(given: Mapping[str, Any]) -> Frame:
    local = given.get("locals") or ()
    arguments = {str(v["name"]): str(v["repr"]) for v in local if v.get("arg") and v.get("repr")}
    return Frame(str(given["name"]), str(given["filename"]), int(given["line"]), arguments)


def _reason(said: str) -> str:
    """Return the reason from py-spy's output, which continues with py-spy's stack."""
    if "ermission denied" in said or "not permitted" in said:
        return "the kernel does not let you read that process's memory: ask as root"
    first = said.strip().partition("\n")[0].removeprefix("Error: ")
    return f"py-spy says: {first or 'nothing'}"


_PR_SET_PTRACER = 0x59616D61


def allow_launcher_to_inspect(server_pid: int) -> None:
    """Permit the launcher, `server_pid`'s parent, to read this process and its forks."""
    if (server := read_stat(server_pid)) is not None:
        allow = partial(ctypes.CDLL(None).prctl, _PR_SET_PTRACER, server.parent, 0, 0, 0)
        allow()
        os.register_at_fork(after_in_child=allow)
