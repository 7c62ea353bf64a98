"""How does a call get to the workers, and its results back? As pickled values, with their source.

Functions and classes of a notebook or a script travel with all that they use; those of a module
travel by name, and every worker imports that module anew from its file. The lines of cells travel
too: they are in no file, and tracebacks in workers should show them.
"""

from __future__ import annotations

import io
import linecache
import os
import reprlib
import traceback
from collections.abc import Callable
from typing import Any

from unisono.launch.caller_state import caller_modes, generator_states


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a call, and the state of the caller that its workers start from.

    Raises:
        TypeError: `fn` cannot be called, or something cannot be pickled; the message names it.
    """
    from unisono.launch.pickling import Pickler

    if not callable(fn):
        raise TypeError(
            f"`fn` must be a function that every worker calls, but is {reprlib.repr(fn)}: "
            "pass the function itself, as in `launch(main, workers=2)`."
        )
    file = io.BytesIO()
    pickler = Pickler(file)
    call = {
        "function": fn,
        "args": args,
        "states": generator_states(),
        "modes": caller_modes(),
        "sources": sources_without_files(),
        "of_main": pickler.of_main,  # last, as pickling the others fills it
    }
    try:
        pickler.dump(call)
    except Exception as error:
        raise TypeError(
            f"`fn` and its arguments must be picklable, but {_culprit(fn, args)} not ({error}): "
            "open files, locks and the like inside the function instead of passing them in."
        ) from (error if _is_of_the_caller(error) else None)
    return file.getvalue()


def pack_result(result: Any) -> bytes:
    """Pickle what a worker's function returned.

    Raises:
        TypeError: it cannot be pickled; the message says why.
    """
    from unisono.launch.pickling import dumps

    try:
        return dumps(result)
    except Exception as error:
        raise TypeError(
            f"what a worker returns must be picklable, but a `{type(result).__qualname__}` is not "
            f"({error}): return numbers, tensors, or what is made of them, or nothing."
        ) from (error if _is_of_the_caller(error) else None)


def _culprit(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Name the first part of a call that cannot be pickled."""
    from unisono.launch.pickling import dumps

    names = [f"function `{name_of(fn)}`", *(f"argument {i}" for i in range(1, len(args) + 1))]
    for name, part in zip(names, (fn, *args), strict=True):
        try:
            dumps(part)
        except Exception:
            # Classes may raise anything while they are pickled.
            return f"{name} is"
    return "are"


def _is_of_the_caller(error: BaseException) -> bool:
    """Tell whether the caller's code, such as a ``__reduce__``, raised it, and not a pickler."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name = str(frame.f_globals.get("__name__", ""))
    return name.split(".")[0] not in ("cloudpickle", "pickle", __name__.split(".")[0])


def unpack_result(packed: bytes, rank: int) -> Any:
    """Unpickle what :func:`pack_result` packed on worker `rank`; None if there is nothing.

    Raises:
        TypeError: it cannot be unpickled here.
    """
    from unisono.launch.pickling import load

    if not packed:  # it left by `sys.exit(0)`
        return None
    try:
        return load(packed)
    except Exception as error:
        raise TypeError(
            f"what worker {rank} returned cannot be built here ({error}): return numbers, tensors, "
            f"or what is made of them, or let its module be imported here as it is in workers."
        ) from error


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of what is called, for messages; for an object, that of its class."""
    kind = type(fn)
    return str(getattr(fn, "__qualname__", f"{kind.__module__}.{kind.__qualname__}"))


def sources_without_files() -> dict[str, list[str]]:
    """Return the lines of source that Python knows and that are in no file: notebooks' cells."""
    return {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }


def know_sources(sources: dict[str, list[str]]) -> None:
    """Have tracebacks and :mod:`inspect` find these lines, in a worker."""
    for name, lines in sources.items():
        # Without a time of change it is never compared with a file.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
