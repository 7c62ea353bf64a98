"""What happened once in a run, in words."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.quantities import plural
from unisono.report.events import End, Event, Failure, Interrupted, Start, WentBack, Workers


@dataclass(frozen=True)
class Mark:
    """Something that happened once, at a step."""

    step: int
    time_unix_s: float
    text: str


def mark_of(event: Event) -> Mark | None:
    """Return what an event tells of that happens once; None of what is usual."""
    said = _said(event)
    return None if said is None else Mark(event.step, event.time_unix_s, said)


def _said(event: Event) -> str | None:
    match event:
        case Start(step=step, world_size=world_size) if step > 0:
            workers = f" on {plural(world_size, 'worker')}" if world_size else ""
            return f"started again at step {step}{workers}"
        case Workers():
            return event.in_words
        case WentBack(step=step, from_step=None):
            return f"went back to step {step}"
        case WentBack(step=step, from_step=int(from_step)):
            words = f"went back to step {step} from step {from_step}"
            return f"{words}: {from_step - step} came again, with the same result"
        case Interrupted():
            return f"interrupted {event.in_words}"
        case Failure(rank=rank):
            whose = "" if rank is None else f"worker {rank}: "
            return f"{whose}{event.in_words}"
        case End(step=step, stopped_early=True):
            return f"stopped early after {step} steps"
    return None
