"""What happened once in a run, in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from unisono.report.events import End, Event, Failure, Interrupted, Start, WentBack, Workers
from unisono.report.text import plural


class Kind(Enum):
    """What sort of thing happened; the value is the word for it."""

    RESUMED = "resumed"
    LOST = "lost"
    JOINED = "joined"
    CHANGED = "workers"
    WENT_BACK = "went back"
    NOT_FINITE = "not finite"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True)
class Mark:
    """Something that happened once, at a step."""

    step: int
    time_unix_s: float
    kind: Kind
    text: str


def mark_of(event: Event) -> Mark | None:
    """Return what an event tells of that happens once; None of what is usual."""
    said = _said(event)
    return None if said is None else Mark(event.step, event.time_unix_s, *said)


def _said(event: Event) -> tuple[Kind, str] | None:
    if isinstance(event, Start) and event.step > 0:
        workers = f" on {plural(event.world_size, 'worker')}" if event.world_size else ""
        return Kind.RESUMED, f"started again at step {event.step}{workers}"
    if isinstance(event, Workers):
        kind = Kind.LOST if event.lost else Kind.JOINED if event.joined else Kind.CHANGED
        return kind, event.in_words
    if isinstance(event, WentBack):
        return Kind.WENT_BACK, _back_in_words(event)
    if isinstance(event, Interrupted):
        return Kind.ENDED, f"interrupted {event.in_words}"
    if isinstance(event, Failure):
        whose = "" if event.rank is None else f"worker {event.rank}: "
        return Kind.FAILED, f"{whose}{event.in_words}"
    if isinstance(event, End) and event.stopped_early:
        return Kind.ENDED, f"stopped early after {event.step} steps"
    return None


def _back_in_words(event: WentBack) -> str:
    text = f"went back to step {event.step}"
    if event.from_step is None:
        return text
    again = event.from_step - event.step
    return f"{text} from step {event.from_step}: {again} came again, with the same result"
