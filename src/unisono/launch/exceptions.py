"""How does an exception get from a worker to the one who called ``launch``?

Twice: as the text that Python would have printed, without the frames that brought the program to
life, and, where it can be pickled, as the exception itself.
"""

from __future__ import annotations

import traceback
from types import TracebackType

from unisono.errors import PeerLostError

_OUR_FRAMES = ("unisono.launch.", "runpy", "importlib._bootstrap")


def traceback_text(error: BaseException) -> str:
    """Format `error` as plain Python would print it, had it run the program itself."""
    trace = program_frames(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip("\n")


def summary_line(error: BaseException) -> str:
    """Describe `error` in one line, ``Type: message``."""
    return traceback.format_exception_only(type(error), error)[-1].strip()


def program_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames before the program's own; all of them when it never began."""
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    return trace


def is_consequence(error: BaseException) -> bool:
    """Tell whether a worker failed only because another one was gone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PeerLostError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def pack_exception(error: BaseException) -> bytes:
    """Pickle `error`, or give nothing when it would not come out again as it went in."""
    import cloudpickle

    for candidate in (error, (type(error), error.args, error.__dict__)):
        try:
            packed: bytes = cloudpickle.dumps(candidate)
            if type(unpack_exception(packed)) is type(error):
                return packed
        except Exception:
            # Classes may do anything while they are pickled; the question is only if it works.
            continue
    return b""


def unpack_exception(packed: bytes) -> BaseException | None:
    """Build the exception that :func:`pack_exception` packed; None when it cannot be built here."""
    import cloudpickle

    try:
        unpacked = cloudpickle.loads(packed)
    except Exception:
        # The class may need a module that only the workers can import; the text is there anyway.
        return None
    if isinstance(unpacked, tuple):
        # Classes with arguments of their own in __init__ do not survive pickling; their parts do.
        cls, arguments, attributes = unpacked
        unpacked = cls.__new__(cls, *arguments)
        unpacked.__dict__.update(attributes)
    return unpacked if isinstance(unpacked, BaseException) else None


def _is_ours(trace: TracebackType) -> bool:
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    file = trace.tb_frame.f_code.co_filename
    return name.startswith(_OUR_FRAMES) or file.startswith("<frozen ")
