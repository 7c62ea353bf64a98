"""How exceptions are reported: with their step and shard, and to the other workers.

What one worker raises outside of steps, all raise, so a program that catches it continues the same
way on every worker. The name, the message and what JSON holds of the arguments and attributes are
sent, never the object. The others create one of the same class, which their program also has.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.runtime.notices import add_note, text_of
from unisono.training.hints import hint_for

_SAMPLES_AT_MOST = 8
_LEFT_BY = "loops left by"  # in ``run.last``: an exception, from which loop to which
_NOTES_AT_MOST = 256  # because each snapshot contains them
_PACKAGE = __name__.partition(".")[0] + "."


def failure(error: BaseException, rank: int) -> bytes:
    """Return a description of this worker's exception, for the others."""
    told = described(error)
    if not _is_refusal(error):
        trace = "".join(traceback.format_exception(error))
        told["note"] = f"On rank {rank} that was:\n{trace}"
    return json.dumps(told).encode()


def described(error: BaseException) -> dict[str, Any]:
    """Return a description of an exception and its cause, as JSON values."""
    causes = {"cause": error.__cause__} if error.__cause__ is not None else {}
    return _described(error) | {name: _described(cause) for name, cause in causes.items()}


def raised(told: bytes) -> BaseException:
    """Return an exception like the one that another worker has described."""
    return like(json.loads(told))


def like(said: Mapping[str, Any]) -> BaseException:
    """Return an exception like one that was :func:`described`."""
    error = _created(said)
    if "cause" in said:
        error.__cause__ = _created(said["cause"])
    if "note" in said:
        add_note(error, said["note"])
    return error


def note_left_by(last: dict[str, Any], loop: int, error: BaseException) -> None:
    """Record in ``run.last`` by which exception loop number `loop` is left.

    A replacement and a resumed run raise it there again, so that the program takes the same course.
    """
    told, notes = described(error), last.setdefault(_LEFT_BY, [])
    if notes and notes[-1][0] == told and notes[-1][2] == loop - 1:
        notes[-1][2] = loop
    else:
        last[_LEFT_BY] = [*notes, [told, loop, loop]][-_NOTES_AT_MOST:]


def forget_left_by(last: dict[str, Any], loop: int) -> None:
    """Forget by what loop number `loop` was left before, as it begins or is continued."""
    if notes := last.pop(_LEFT_BY, None):
        last[_LEFT_BY] = [[one, a, min(z, loop - 1)] for one, a, z in notes if a < loop]


def raise_as_left(last: Mapping[str, Any], loop: int) -> None:
    """Raise an exception like the one by which a loop was left, if it was."""
    for told, first, newest in last.get(_LEFT_BY, ()):
        if first <= loop <= newest:
            raise like(told)


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


def share_outcome(
    hear: Callable[[Callable[[], bytes]], Sequence[bytes]], act: Callable[[], Any], rank: int
) -> list[Any]:
    """Run `act` on the workers that `hear` asks; what one raises, all raise. Collective."""
    caught: BaseException | None = None

    def speak() -> bytes:
        nonlocal caught
        try:
            return json.dumps(act()).encode()
        except BaseException as error:
            caught = error
            return b"\n" + failure(error, rank)

    heard = hear(speak)
    for answer in heard:
        if answer.startswith(b"\n"):
            raise raised(answer[1:]) if caught is None else caught
    return [json.loads(answer) for answer in heard]


def note_origin(error: BaseException, place: str) -> None:
    """Add a note on where an exception was raised, unless its message comes from Unisono."""
    if isinstance(error, Exception) and not _is_refusal(error):
        add_note(error, f"This was {place}. {hint_for(error)}".rstrip())


def samples_in_words(indices: Sequence[int]) -> str:
    """Describe the samples of a batch: ``samples 3, 1, 4`` and how many more there are."""
    few = ", ".join(map(str, indices[:_SAMPLES_AT_MOST]))
    more = len(indices) - _SAMPLES_AT_MOST
    return f"sample{'s' * (len(indices) > 1)} {few}" + (f" and {more} more" if more > 0 else "")


def _is_refusal(error: BaseException) -> bool:
    """Return whether Unisono raised it, with a message that needs no further frame."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith(_PACKAGE)
