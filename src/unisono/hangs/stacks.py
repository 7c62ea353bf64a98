"""What a process's Python stack says: whose code is it in, and how is it shown? Pure.

A stack is a tuple of frames, the innermost first, as the sampler gives it. ::

    load_image   train.py:88          your code: shown
    __getitem__  train.py:70          your code: shown
    _read_one    unisono/data/…       Unisono's, torch's, other libraries': folded into one line
    main         train.py:120         your code: shown
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from unisono.notices import shown

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARY = re.compile(r"/(site|dist)-packages/([^/]+)")
_PYTHONS_OWN = re.compile(r"/lib(?:64)?/python3\.\d+t?/|^<frozen ")
AT_THE_END = "_finish_as_python_does"
_STARTERS = ("unisono/launch/program.py", "unisono/launch/worker.py")
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
        """Tell whether its file's path ends in one of these."""
        return self.file.endswith(ends)

    @property
    def name(self) -> str:
        """The function's name without that of its class."""
        return self.function.rpartition(".")[2]

    @property
    def place(self) -> str:
        """Write it as ``train.py:88``."""
        return f"{shown(os.path.basename(self.file))}:{self.line}"

    @property
    def words(self) -> str:
        """Write it as ``` `load_image`, train.py:88 ```."""
        function = "the script" if self.function == "<module>" else f"`{shown(self.name)}`"
        return f"{function}, {self.place}"


Stack = tuple[Frame, ...]


def main_stack(dump: Sequence[Mapping[str, Any]], pid: int) -> Stack:
    """Read the stack of a process's first thread from what py-spy has written as JSON.

    Args:
        dump: one object for each thread.
        pid: the process; its first thread has the same number.

    Raises:
        ValueError: there is no such thread, or the form is another one.
    """
    for thread in dump:
        # A fork that Python has not seen keeps the numbers of the process before.
        if thread.get("os_thread_id") == pid or len(dump) == 1:
            return _within_program(tuple(map(_read_frame, thread["frames"])))
    raise ValueError(f"no stack of thread {pid}")


def holder_stack(dump: Sequence[Mapping[str, Any]], pid: int) -> Stack:
    """Read the stack of the thread that holds Python's lock, if that is not the first one."""
    for thread in dump:
        if thread.get("owns_gil") and thread.get("os_thread_id") != pid:
            return _within_program(tuple(map(_read_frame, thread["frames"])))
    return ()


def native_place(dump: Sequence[Mapping[str, Any]], pid: int) -> str:
    """Name the C function, and its library, in which the thread is that holds Python's lock.

    Where none does, in which the first is; empty where that is in Python code.
    """
    ours = sorted(dump, key=lambda one: (not one.get("owns_gil"), one.get("os_thread_id") != pid))
    library = ""
    for frame in ours[0]["frames"] if ours else ():
        if not frame.get("module"):
            break
        library = library or os.path.basename(str(frame["module"]))
        if not str(frame["name"]).startswith("0x"):
            name = str(frame["name"]).partition("<")[0].replace("(anonymous namespace)::", "")
            return f"`{shown(name)}` of {shown(os.path.basename(str(frame['module'])))}"
    return shown(library)


def _read_frame(given: Mapping[str, Any]) -> Frame:
    local = given.get("locals") or ()
    arguments = {str(v["name"]): str(v["repr"]) for v in local if v.get("arg") and v.get("repr")}
    return Frame(str(given["name"]), str(given["filename"]), int(given["line"]), arguments)


def _within_program(stack: Stack) -> Stack:
    """Leave out the frames that started the program, as far as one has been."""
    for count, frame in enumerate(stack):
        if frame.name == AT_THE_END:
            return stack[: count + 1]
    for count, frame in enumerate(stack):
        if frame.is_in(*_STARTERS):
            return stack[:count] or stack
    return stack


def own_place(stack: Stack) -> Frame | None:
    """Find the innermost frame of the user's; where there is none, the innermost that tells most.

    Returns:
        None for an empty stack.
    """
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
    """Write a stack in lines, the user's frames in full and all others by their number.

    Args:
        stack: the innermost frame first.
        folder: paths below it are written from there.
    """
    if stack and all(frame.owner is not Owner.USER for frame in stack):
        yield from (_line(frame, folder) for frame in stack[:6])
        stack = stack[6:]
    for is_users, frames in groupby(stack, lambda frame: frame.owner is Owner.USER):
        if is_users:
            yield from (_line(frame, folder) for frame in frames)
        else:
            yield _fold(list(frames))


def _line(frame: Frame, folder: str) -> str:
    path = frame.file
    if folder and path.startswith(folder.rstrip("/") + "/"):
        path = os.path.relpath(path, folder)
    return f"{shown(frame.function)}  {shown(path)}:{frame.line}"


def _fold(frames: Sequence[Frame]) -> str:
    owners = ", ".join(o.value for o in Owner if any(frame.owner is o for frame in frames))
    return f"({len(frames)} frame{'s' * (len(frames) > 1)} of {owners})"
