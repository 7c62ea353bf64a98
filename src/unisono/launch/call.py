"""How does a call get to the workers? By value where they could not import it, and with its source.

Functions and classes of a notebook or a script travel with all that they use; those of a module
travel by name, and every worker imports that module anew from its file. The lines of cells travel
too: they are in no file, and tracebacks in workers should show them.
"""

from __future__ import annotations

import linecache
import os
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from unisono.launch.generators import caller_states

_DEEPEST = 6
_ITEMS_AT_MOST = 1000


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a call, together with what its workers begin with.

    Raises:
        TypeError: `fn` cannot be called, or something cannot be pickled; the message names it.
    """
    import cloudpickle

    if not callable(fn):
        raise TypeError(
            f"`fn` must be a function that every worker calls, but is {fn!r}: "
            "pass the function itself, as in `launch(main, workers=2)`."
        )
    call = {
        "function": fn,
        "args": args,
        "states": caller_states(),
        "sources": sources_without_files(),
    }
    try:
        packed: bytes = cloudpickle.dumps(call)
    except Exception as error:
        way = way_to_culprit(_roots(fn, args))
        culprit = f"{' → '.join(way)} is" if way else "are"
        raise TypeError(
            f"`fn` and its arguments must be picklable, but {culprit} not ({error}): open files, "
            "locks and the like inside the function instead of passing them in."
        ) from (error if _is_of_the_caller(error) else None)
    return packed


def pack_result(result: Any) -> bytes:
    """Pickle what a worker's function returned.

    Raises:
        TypeError: something in it cannot be pickled; the message names it.
    """
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(result)
    except Exception as error:
        way = way_to_culprit([("the value", result)])
        raise TypeError(
            f"what a worker returns must be picklable, but {' → '.join(way) or 'it'} is not "
            f"({error}): return numbers, tensors, or what is made of them, or nothing."
        ) from (error if _is_of_the_caller(error) else None)
    return packed


def sources_without_files() -> dict[str, list[str]]:
    """Take the lines of source that Python knows of but that are in no file: cells of notebooks."""
    return {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }


def know_sources(sources: dict[str, list[str]]) -> None:
    """Let tracebacks and :mod:`inspect` find these lines, in a worker."""
    for name, lines in sources.items():
        # Without a time of change it is never compared with a file.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _is_of_the_caller(error: BaseException) -> bool:
    """Tell whether code of the caller, such as a ``__reduce__``, raised it, and not a pickler's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.split(".")[0] not in ("cloudpickle", "pickle", __name__.split(".")[0])


def way_to_culprit(roots: Iterable[tuple[str, Any]]) -> list[str]:
    """Name what holds the innermost part that cannot be pickled, from the outside in.

    Args:
        roots: values with their names; the first that cannot be pickled is looked into.
    """
    for name, value in roots:
        if not _can_be_pickled(value):
            return _way_into(name, value, set())
    return []


def _roots(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    called = f"function `{getattr(fn, '__qualname__', repr(fn))}`"
    return [(called, fn), *((f"argument {i}", arg) for i, arg in enumerate(args, 1))]


def _way_into(name: str, value: Any, seen: set[int]) -> list[str]:
    seen.add(id(value))
    if len(seen) <= _DEEPEST:
        for part_name, part in _parts(value):
            if id(part) not in seen and not _can_be_pickled(part):
                return [name, *_way_into(part_name, part, seen)]
    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return [f"{name} (a `{module}{kind.__qualname__}`)"]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """List what is pickled with a value, each with a name for messages."""
    if isinstance(value, types.MethodType):
        yield "`self`", value.__self__
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for name, cell in cells:
            # An empty one belongs to a variable that has not been given a value yet.
            if cell != types.CellType():
                yield f"captured variable `{name}`", cell.cell_contents
        for name in sorted(_names_in(value.__code__)):
            if name in value.__globals__:
                yield f"global variable `{name}`", value.__globals__[name]
        for default in value.__defaults__ or ():
            yield "a default argument", default
    elif isinstance(value, type):
        for name, part in list(vars(value).items()):
            if isinstance(part, types.FunctionType):
                yield f"method `{name}`", part
    elif isinstance(value, dict):
        yield from ((f"item {key!r}", value[key]) for key in list(value)[:_ITEMS_AT_MOST])
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {i}", part) for i, part in enumerate(list(value)[:_ITEMS_AT_MOST]))
    else:
        yield f"its class `{type(value).__qualname__}`", type(value)
        attributes = list(getattr(value, "__dict__", {}).items())
        yield from ((f"attribute `{name}`", part) for name, part in attributes)


def _names_in(code: types.CodeType) -> set[str]:
    """Collect the names of globals that a function uses, and functions inside of it."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _can_be_pickled(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        # Classes may do anything while they are pickled; the question is only if it works.
        return False
    return True
