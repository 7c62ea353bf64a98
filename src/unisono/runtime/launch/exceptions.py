"""Transfer an exception from a worker to the caller of ``launch``.

It is sent as the text that Python would have printed, without the frames that started the program,
and also as the exception itself if it can be pickled. Never loads torch: launchers import this.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.errors import PeerLostError
from unisono.runtime.notices import plural, text_of

_OUR_FRAMES = ("unisono.runtime.launch.", "runpy", "importlib._bootstrap")
# What gloo, NCCL and the store report when the other end of a connection is gone.
_DISCONNECTED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Connection was likely closed",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
    "ncclRemoteError",
)
_READ_AT_MOST = 100_000
_FRAME = re.compile(r'^([ |]*)File "([^"\n]+)", line (\d+)', re.MULTILINE)
_NATIVE_STACK = re.compile(
    r"(?:Exception raised from [^\n]* \(most recent call first\):\n)?"
    r"(?:[ ]*frame #\d+: [^\n]*(?:\n|$))+(?:\n(?=\n))?"
)
_NATIVE_VARIABLE = "TORCH_SHOW_CPP_STACKTRACES"
TRACEBACK_VARIABLE = "UNISONO_TRACEBACK"
_PACKAGE = re.escape(str(Path(__file__).resolve().parents[2]))
# Consecutive frames of Unisono, with the source lines below each.
_OWN_FRAMES = re.compile(
    rf'(?:^(?P<indent>[ |]*)File "{_PACKAGE}/(?!recipes/)[^"\n]+", line \d+[^\n]*\n'
    r"(?:(?P=indent)(?:  |\[Previous line)[^\n]*\n)*)+",
    re.MULTILINE,
)


def traceback_text(error: BaseException) -> str:
    """Format `error` as Python would print it if it had run the program itself."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next  # all of them, if the program never began
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip("\n")
    return without_native_frames(without_own_frames(text))


def summary_line(error: BaseException) -> str:
    """Describe `error`, and the members of a group, in one line, without notes of its place."""
    told = traceback.TracebackException(type(error), error, None)
    told.__notes__ = None
    line = list(told.format_exception_only())[-1].strip()
    words = dict.fromkeys(summary_line(one).splitlines()[0] for one in _singles(error))
    return f"{line}: {'; '.join(words)}" if words else line


def _singles(error: BaseException) -> list[BaseException]:
    """Return the exceptions of a group and its subgroups; empty for a single exception."""
    if not isinstance(error, BaseExceptionGroup):
        return []
    return [single for one in error.exceptions for single in _singles(one) or [one]]


def without_own_frames(text: str) -> str:
    """Fold Unisono's frames, unless they are requested or there are no others."""

    def fold(match: re.Match[str]) -> str:
        count = len(_FRAME.findall(match[0]))
        return (
            f"{match['indent']}({plural(count, 'frame')} of Unisono left out; "
            f"`unisono run --traceback`, or {TRACEBACK_VARIABLE}=1, shows all)\n"
        )

    shows_all = os.environ.get(TRACEBACK_VARIABLE, "0") != "0"
    folded = _OWN_FRAMES.sub(fold, text)
    return text if shows_all or not _FRAME.search(folded) else folded


def without_native_frames(text: str) -> str:
    """Fold C++ stacks, which torch puts before Python's own, unless they are requested."""

    def fold(match: re.Match[str]) -> str:
        count = match[0].count("frame #")
        return f"({count} frames of C++ left out; {_NATIVE_VARIABLE}=1 shows them)"

    shows_all = os.environ.get(_NATIVE_VARIABLE) == "1"
    return text if shows_all else _NATIVE_STACK.sub(fold, text)


def shortened(text: str) -> str:
    """Cut off the end of a very long text."""
    return text if len(text) <= _READ_AT_MOST else f"{text[:_READ_AT_MOST]} …"


def lost_peer(error: BaseException) -> int | None:
    """Return the lost worker, if the error is only a consequence of that loss; else None."""
    return next((e.rank for e in _chain(error) if isinstance(e, PeerLostError)), None)


def is_disconnect(error: BaseException) -> bool:
    """Return whether torch reports only that some rank is gone, not which one or why."""
    return any(
        _is_of_torch(e) and any(words in text_of(e) for words in _DISCONNECTED)
        for e in _chain(error)
    )


def _is_of_torch(error: BaseException) -> bool:
    """Return whether torch or gloo has raised an error, not the program for a server of its own."""
    if not isinstance(error, RuntimeError):
        return False
    return type(error).__module__.startswith("torch") or ".cc:" in text_of(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, the members of groups, its cause or context, and so on."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # `raise error from error` is allowed
        seen.add(id(error))
        yield error
        yield from _singles(error)
        error = error.__cause__ or error.__context__


def own_excepthook(hook: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the hook that a program has set, which torch may have wrapped; None if it has none."""
    while str(getattr(hook, "__module__", "")).startswith("torch.distributed"):
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return None if hook is sys.__excepthook__ else hook


def pack_exception(error: BaseException) -> bytes:
    """Pickle `error`; return nothing if it would not unpickle to the same type."""
    from unisono.runtime.launch.pickling import dumps

    for candidate in (error, (type(error), error.args, error.__dict__)):
        try:
            packed = dumps(candidate)
            if type(unpack_exception(packed)) is type(error):
                return packed
        except Exception:
            # Classes may raise anything while they are pickled.
            continue
    return b""


def unpack_exception(packed: bytes) -> BaseException | None:
    """Unpickle the result of :func:`pack_exception`; None if that is not possible here."""
    from unisono.runtime.launch.pickling import load

    try:
        unpacked = load(packed)
    except Exception:
        # The class may need a module that only the workers can import.
        return None
    if isinstance(unpacked, tuple):
        # A class with a different __init__ cannot be unpickled, but its parts can.
        cls, arguments, attributes = unpacked
        unpacked = cls.__new__(cls, *arguments)
        unpacked.__dict__.update(attributes)
    return unpacked if isinstance(unpacked, BaseException) else None


def name_cells(text: str) -> str:
    """Replace file names of notebook cells by ``Cell In[3], line 2``, as IPython does."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: None)

    def named(match: re.Match[str]) -> str:
        indent, file, line = match.groups()
        name = name_of(file)
        return match.group() if name is None else f"{indent}{' '.join(name)}, line {line}"

    return _FRAME.sub(named, text)


def _is_ours(trace: TracebackType) -> bool:
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    file = trace.tb_frame.f_code.co_filename
    return name.startswith(_OUR_FRAMES) or file.startswith("<frozen ")
