"""What can happen to a membership, and what can follow: the events and actions of ``recovery``."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.workers.launcher_messages import (
    CatchUp,
    JointResult,
    LoopBegan,
    NoRecovery,
    Ready,
    Stopped,
    ToWorker,
)
from unisono.workers.meeting_point import Departure

# What a worker says that decides who computes.
OfRecovery = Ready | NoRecovery | Stopped | CatchUp | JointResult | LoopBegan


@dataclass(frozen=True, slots=True)
class Said:
    """A worker has sent a message."""

    rank: int
    message: OfRecovery


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker was killed."""

    rank: int  # which
    now: float  # the time of a monotonic clock, in seconds
    had_begun: bool = True  # whether its program had begun; one that had not can always be run
    how: str = ""  # in words, such as "worker 1 was killed by SIGKILL"


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker takes no part any more: its program has ended, or it has left."""

    rank: int


@dataclass(frozen=True, slots=True)
class StopWanted:
    """The job shall end after the step under way."""


Event = Said | Lost | Gone | StopWanted


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
