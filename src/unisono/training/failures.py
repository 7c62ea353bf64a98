"""How exceptions are reported: with their step and shard, and to the other workers.

What one worker raises outside of steps, all raise, so a program that catches it continues the same
way on every worker.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.runtime.described import described, like
from unisono.runtime.notices import add_note
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


def raised(told: bytes) -> BaseException:
    """Return an exception like the one that another worker has described."""
    return like(json.loads(told))


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
