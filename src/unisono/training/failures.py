"""How exceptions are reported: with their step and shard, and to the other workers.

What one worker raises outside of steps, all raise, so a program that catches it continues the same
way on every worker. The name and the message are sent, never the object. The others create one of
the same class, which their program also has; a RuntimeError if the class needs more arguments.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.runtime.notices import add_note, text_of
from unisono.training.hints import hint_for

_SAMPLES_AT_MOST = 8
_PACKAGE = __name__.partition(".")[0] + "."


def failure(error: Exception, rank: int) -> bytes:
    """Return a description of this worker's exception, for the others."""
    told: dict[str, Any] = _described(error)
    if error.__cause__ is not None:
        told["cause"] = _described(error.__cause__)
    if not _is_refusal(error):
        trace = "".join(traceback.format_exception(error))
        told["note"] = f"On rank {rank} that was:\n{trace}"
    return json.dumps(told).encode()


def raised(told: bytes | str) -> Exception:
    """Return an exception like the one that another worker has described."""
    said = json.loads(told)
    error = _created(said)
    if "cause" in said:
        error.__cause__ = _created(said["cause"])
    if "note" in said:
        add_note(error, said["note"])
    return error


def _described(error: BaseException) -> dict[str, str]:
    kind = type(error)
    return {"module": kind.__module__, "name": kind.__qualname__, "text": text_of(error)}


def _created(said: Mapping[str, str]) -> Exception:
    kind = getattr(sys.modules.get(said["module"]), said["name"], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(Exception):
            return kind(said["text"])
    return RuntimeError(f"{said['name']}: {said['text']}")


def share_outcome(
    hear: Callable[[Callable[[], bytes]], Sequence[bytes]], act: Callable[[], Any], rank: int
) -> list[Any]:
    """Run `act` on the workers that `hear` asks; what one raises, all raise. Collective."""
    caught: Exception | None = None

    def speak() -> bytes:
        nonlocal caught
        try:
            return json.dumps(act()).encode()
        except Exception as error:
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


def _is_refusal(error: Exception) -> bool:
    """Return whether Unisono raised it, with a message that needs no further frame."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith(_PACKAGE)
