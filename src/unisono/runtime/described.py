"""Exceptions as JSON, for other workers and later starts, which raise one like it.

The name, the message and what JSON holds of the arguments and attributes are sent, never the
object. The others create one of the same class, which their program also has.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

from unisono.runtime.notices import add_note, text_of


def described(error: BaseException) -> dict[str, Any]:
    """Return a description of an exception and its cause, as JSON values."""
    causes = {"cause": error.__cause__} if error.__cause__ is not None else {}
    return _described(error) | {name: _described(cause) for name, cause in causes.items()}


def like(said: Mapping[str, Any]) -> BaseException:
    """Return an exception like one that was :func:`described`."""
    error = _created(said)
    if "cause" in said:
        error.__cause__ = _created(said["cause"])
    if "note" in said:
        add_note(error, said["note"])
    return error


def _described(error: BaseException) -> dict[str, Any]:
    kind, text = type(error), text_of(error)
    fields = {name: one for name, one in vars(error).items() if name[:2] != "__" and _is_json(one)}
    told = {"module": kind.__module__, "name": kind.__qualname__, "text": text, "fields": fields}
    if isinstance(error, BaseExceptionGroup):
        return told | {"args": [error.message], "members": [*map(described, error.exceptions)]}
    return told | {"args": [*error.args] if _is_json([*error.args]) else [text]}


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except Exception:  # the program's objects may raise anything
        return False


def _created(said: Mapping[str, Any]) -> BaseException:
    kind = getattr(sys.modules.get(said["module"]), said["name"], None)
    members = [[*map(like, said["members"])]] if "members" in said else []
    if isinstance(kind, type) and issubclass(kind, BaseException):
        for make in (kind, functools.partial(kind.__new__, kind)):  # its own may take others
            with contextlib.suppress(Exception):
                error: BaseException = make(*said["args"], *members)
                vars(error).update(said["fields"])
                return error
    return RuntimeError(f"{said['name']}: {said['text']}")
