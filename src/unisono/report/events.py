"""What can happen in a run, as its event file tells it?

What a line does not say has a default that says so: None, an empty tuple, NaN. `docs/events.md` has
every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

PHASES = ("loading", "forward", "backward", "waiting", "summing", "updating")

Column: TypeAlias = "tuple[float | None, ...]"


@dataclass(frozen=True)
class Start:
    """A fit, or one that starts again, begins."""

    time_unix_s: float
    step: int
    clock_s: float | None
    epoch: int | None
    end_step: int | None
    steps_per_epoch: int | None
    num_samples: int | None
    batch_size: int | None
    shards: int | None
    seed: int | None
    world_size: int | None
    ranks: tuple[int, ...]
    pids: tuple[int | None, ...]
    host: str | None
    identity: Mapping[str, Any]
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    command: tuple[str, ...]
    folder: str | None
    num_parameters: int | None
    loader_workers: int | None


@dataclass(frozen=True)
class StepDone:
    """A step has ended. A column has one entry a rank, or is empty if the line had none.

    ``begun_s`` is on the clock of :attr:`Start.clock_s`; an entry is None where a worker was lost.
    """

    time_unix_s: float
    step: int
    epoch: int | None
    num_samples: int | None
    seconds: float | None
    means: Mapping[str, float]
    learning_rates: tuple[float, ...]
    gradient_norm: float | None
    ranks: tuple[int, ...]
    begun_s: Column
    loading_s: Column
    forward_s: Column
    backward_s: Column
    waiting_s: Column
    summing_s: Column
    updating_s: Column

    def phase(self, name: str) -> Column:
        """Return how long each rank spent in one of :data:`PHASES`, in seconds."""
        column: Column = getattr(self, f"{name}_s")
        return column


@dataclass(frozen=True)
class Workers:
    """Who computes has changed."""

    time_unix_s: float
    step: int
    ranks: tuple[int, ...]
    pids: tuple[int | None, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    why: tuple[str, ...]

    @property
    def in_words(self) -> str:
        """What happened, as the file tells it; else who was lost and who has come."""
        lost = [f"worker {rank} was lost" for rank in self.lost]
        joined = [f"worker {rank} has come" for rank in self.joined]
        return "; ".join(self.why) or "; ".join([*lost, *joined]) or "others compute now"


@dataclass(frozen=True)
class WentBack:
    """The steps from ``step`` on come again; ``from_step`` is how far the run had been."""

    time_unix_s: float
    step: int
    from_step: int | None


@dataclass(frozen=True)
class Evaluation:
    """The means over a validation set after ``step`` steps."""

    time_unix_s: float
    step: int
    epoch: int | None
    seconds: float | None
    means: Mapping[str, float]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint has been asked for after ``step`` steps."""

    time_unix_s: float
    step: int


@dataclass(frozen=True)
class Failure:
    """A fit has ended with an exception."""

    time_unix_s: float
    step: int
    rank: int | None
    error: str
    message: str


@dataclass(frozen=True)
class Interrupted(Failure):
    """Somebody has ended a fit; the message says how."""


@dataclass(frozen=True)
class End:
    """A fit has ended well, after ``step`` steps."""

    time_unix_s: float
    step: int
    seconds: float | None
    samples_per_second: float | None
    digest: str | None
    stopped_early: bool


Event: TypeAlias = "Start | StepDone | Workers | WentBack | Evaluation | Checkpoint | Failure | End"
