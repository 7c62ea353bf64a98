"""Which part of a value cannot be pickled? Its name, and those of what holds it, outermost first.

A pickler does not report its path, so parts are pickled one by one until the innermost is found.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

_DEEPEST = 6
_ITEMS_AT_MOST = 1000


def way_to_culprit(roots: Iterable[tuple[str, Any]]) -> list[str]:
    """Name what holds the innermost part that cannot be pickled, outermost first.

    Args:
        roots: values with their names; the first that cannot be pickled is looked into.
    """
    for name, value in roots:
        if not _can_be_pickled(value):
            return _way_into(name, value, set())
    return []


def is_of_the_caller(error: BaseException) -> bool:
    """Tell whether the caller's code, such as a ``__reduce__``, raised it, and not a pickler."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.split(".")[0] not in ("cloudpickle", "pickle", __name__.split(".")[0])


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
    """Yield what is pickled with a value, each part with a name for messages."""
    if isinstance(value, types.MethodType):
        yield "`self`", value.__self__
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for name, cell in cells:
            # An empty cell belongs to a variable that has no value yet.
            if cell != types.CellType():
                yield f"captured variable `{name}`", cell.cell_contents
        for name in sorted(_names_in(value.__code__)):
            if name in value.__globals__:
                yield f"global variable `{name}`", value.__globals__[name]
        for default in value.__defaults__ or ():
            yield "a default argument", default
    elif isinstance(value, functools.partial):
        yield "function", value.func
        yield from ((f"argument {i}", part) for i, part in enumerate(value.args, 1))
        yield from ((f"argument `{name}`", part) for name, part in value.keywords.items())
    elif isinstance(value, type):
        yield from _parts_of_class(value)
    elif isinstance(value, dict):
        yield from ((f"item {key!r}", value[key]) for key in list(value)[:_ITEMS_AT_MOST])
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {i}", part) for i, part in enumerate(list(value)[:_ITEMS_AT_MOST]))
    else:
        yield f"its class `{type(value).__qualname__}`", type(value)
        attributes = list(getattr(value, "__dict__", {}).items())
        yield from ((f"attribute `{name}`", part) for name, part in attributes)


def _parts_of_class(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class holds, its methods last, as they may name the class itself."""
    parts = [(name, part) for name, part in vars(cls).items() if not _is_made_by_python(name, part)]
    is_method = {name: isinstance(part, types.FunctionType) for name, part in parts}
    yield from ((f"attribute `{name}`", part) for name, part in parts if not is_method[name])
    yield from ((f"method `{name}`", part) for name, part in parts if is_method[name])


def _is_made_by_python(name: str, part: object) -> bool:
    slots = (types.GetSetDescriptorType, types.MemberDescriptorType)
    return name == "_abc_impl" or isinstance(part, slots)


def _names_in(code: types.CodeType) -> set[str]:
    """Collect the names of globals that a function and its inner functions use."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _can_be_pickled(value: Any) -> bool:
    from unisono.launch.pickling import dumps

    try:
        dumps(value)
    except Exception:
        # Classes may raise anything while they are pickled.
        return False
    return True
