"""What can follow for a membership: the actions that ``recovery`` decides on."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.workers.launcher_messages import ToWorker
from unisono.workers.meeting_point import Departure


@dataclass(frozen=True, slots=True)
class MarkDeparture:
    """Tell all workers, on the control block, whether this one may still come."""

    rank: int
    how: Departure


@dataclass(frozen=True, slots=True)
class Seat:
    """Record on the control block that a replacement has come to as many meetings as the others."""

    rank: int
    arrivals: int


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a replacement."""

    rank: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the request that a worker waits with."""

    rank: int
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Wish:
    """Tell all workers, on the control block, whether to stop between two steps."""

    value: bool


@dataclass(frozen=True, slots=True)
class Joined:
    """Report that replacements have joined the membership."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeepAndEnd:
    """All stand still between two steps: write a checkpoint, then end the job."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The loss ends the job."""


Action = MarkDeparture | Seat | Spawn | Answer | Wish | Joined | KeepAndEnd | GiveUp
