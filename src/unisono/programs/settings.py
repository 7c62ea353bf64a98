"""What a program sets for its whole process, in libraries: how each setting is read and restored.

Libraries follow conventions: what `set_x` sets, `get_x`, `is_x` or `x_enabled` returns, and what
`enable` and `disable` turn on and off, `is_enabled` tells. So a setting is found by the function's
name in the program's code. Functions that return a setting are called only if they take no
argument. Those that follow no convention stand in a table.
"""

from __future__ import annotations

import decimal
import inspect
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

PLAIN = {type(None), bool, int, float, complex, str, bytes}
_ALIKE = (torch.dtype, torch.device, type, types.FunctionType)
_BEGINNINGS = ("set", "enable", "disable")
_OF_RUNS = ("rng_state", "num_threads", "num_interop_threads")  # of torch, set for each loop
_ENVIRONMENT = "os.environ "
_OF_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # differ between workers
_OF_ANOMALIES = ("set_detect_anomaly", "set_anomaly_enabled")
_OF_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


class Setting(NamedTuple):
    """One setting: how it is read and set, and the words by which a program sets it.

    Without one of the `words` in the program's code it is ignored; with no words, it always counts.
    """

    words: tuple[str, ...]
    read: Callable[[], Any]
    put: Callable[[Any], object]


def settings_of(owner: Any, names: Iterable[str]) -> Iterator[tuple[str, Setting]]:
    """Yield the settings that those functions of a module or class set whose names are given."""
    path = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__qualname__
    for name in names:
        begins = next((one for one in _BEGINNINGS if name.startswith(one) and name != "set"), "")
        if not begins or not callable(getattr(owner, name, None)):
            continue
        word = name.removeprefix(begins).removeprefix("_")
        if word in _OF_RUNS:
            continue
        reader = next((one for one in _readers(word) if _takes_nothing(owner, one)), None)
        both = [name.replace(begins, one, 1) for one in ("enable", "disable")]
        is_pair = begins != "set" and all(_takes_nothing(owner, one) for one in both)
        if reader is not None and (word or is_pair):
            put = partial(_put, owner, both if is_pair else [name], reader)
            words = tuple(both) if is_pair else (name,)
            yield f"{path}.{reader}()", Setting(words, getattr(owner, reader), put)


def _readers(word: str) -> Sequence[str]:
    if not word:
        return ("is_enabled", "isenabled")
    return (
        *(f"get_{word}", f"get{word}", f"is_{word}"),
        *(f"is_{word}_enabled", f"{word}_enabled", f"are_{word}_enabled"),
    )


def _takes_nothing(owner: Any, name: str) -> bool:
    """Return whether a function of a module, or a static method, can be called as it is."""
    found = inspect.getattr_static(owner, name, None)
    if isinstance(owner, type) and not isinstance(found, (staticmethod, classmethod)):
        return False
    function = getattr(owner, name, None)
    bound = getattr(function, "__self__", None)
    if isinstance(function, type) or not callable(function):
        return False
    if not (bound is None or bound is owner or isinstance(bound, (type, types.ModuleType))):
        return False  # a method of a hidden object, such as a generator
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):  # made in C: it raises an error if it needs an argument
        return True


def _put(owner: Any, names: Sequence[str], reader: str, value: Any) -> None:
    """Set what a function has returned, and check that it returns the same.

    `names`: the function that sets it, or those that turn it on and off.
    """
    now, put = getattr(owner, reader)(), getattr(owner, names[0])
    if len(names) > 1:
        (put if value else getattr(owner, names[1]))()
    elif isinstance(now, dict):
        put(**dict(value))
    elif isinstance(now, tuple):
        put(*value)
    else:
        put(value)
    if frozen(getattr(owner, reader)()) != value:
        raise RuntimeError(f"`{names[0]}` has not set {value!r}")


def frozen(value: Any) -> Any:
    """Return a setting with tuples in place of dicts, which may be created anew at each reading."""
    return tuple(value.items()) if isinstance(value, dict) else value


def is_plain(value: Any) -> bool:
    """Return whether a value is a plain one, a function or a class, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    if isinstance(value, types.BuiltinFunctionType):  # a method would be created anew
        return isinstance(value.__self__, types.ModuleType)
    return type(value) in PLAIN or isinstance(value, _ALIKE)


def _decimals() -> tuple[Any, ...]:
    context = decimal.getcontext()
    traps = tuple(sorted(each.__name__ for each, is_set in context.traps.items() if is_set))
    return (*(getattr(context, name) for name in _OF_DECIMAL), traps)


def _put_decimals(value: tuple[Any, ...]) -> None:
    context = decimal.getcontext()
    for name, one in zip(_OF_DECIMAL, value[:-1], strict=True):
        setattr(context, name, one)
    for each in context.traps:
        context.traps[each] = each.__name__ in value[-1]


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _put_anomalies(value: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*value)


SETTINGS_OF_PROCESS: dict[str, Setting] = {
    **dict(settings_of(torch, vars(torch))),
    "decimal.getcontext()": Setting(("getcontext",), _decimals, _put_decimals),
    "os.getcwd()": Setting(("chdir",), os.getcwd, os.chdir),
    "torch.get_default_dtype()": Setting(
        ("set_default_dtype", "set_default_tensor_type"),
        torch.get_default_dtype,
        torch.set_default_dtype,
    ),
    "torch.get_deterministic_debug_mode()": Setting(
        ("use_deterministic_algorithms", "set_deterministic_debug_mode"),
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "torch.is_anomaly_enabled()": Setting(_OF_ANOMALIES, _anomalies, _put_anomalies),
    "torch.utils.hooks.RemovableHandle.next_id": Setting(
        (), lambda: RemovableHandle.next_id, partial(setattr, RemovableHandle, "next_id")
    ),
}
"""Settings by how a program reads them; those of other modules are added when they are found."""


def note_settings(owner: Any, names: Iterable[str]) -> None:
    """Add the settings that a library's functions set, if they follow one of the conventions."""
    for path, setting in settings_of(owner, [one for one in names if one.startswith(_BEGINNINGS)]):
        if path not in SETTINGS_OF_PROCESS:
            SETTINGS_OF_PROCESS[path] = setting


def read_settings(owner: Mapping[str, Setting], names: Any) -> tuple[Any, ...]:
    """Return names and values: of settings, and of variables of the environment."""
    # A program names hundreds of things, and few variables of the environment.
    there = sorted(name for name in os.environ if name in names and name not in _OF_PLACE)
    found: dict[str, Any] = {}
    for name, setting in [*owner.items()]:
        if not setting.words or any(word in names for word in setting.words):
            with suppress(Exception):
                value = frozen(setting.read())
                if is_plain(value):
                    found[name] = value
    found |= {f"{_ENVIRONMENT}{name}": os.environ[name] for name in there}
    return tuple(found), tuple(found.values())


def put_settings(
    owner: Mapping[str, Setting], names: Any, wanted: Mapping[str, Any], changed: Iterable[str]
) -> None:
    """Set those settings, and variables of the environment, that have `changed`."""
    for name in changed:
        variable = bare(name)
        if name in owner and name in wanted:
            owner[name].put(wanted[name])
        elif variable not in names or variable in _OF_PLACE:
            continue  # a file could contain names that the program never sets
        elif name in wanted:
            os.environ[variable] = wanted[name]
        else:
            os.environ.pop(variable, None)


def bare(name: str) -> str:
    """Return how a program's code names an environment variable, or any other setting."""
    return name.removeprefix(_ENVIRONMENT)
