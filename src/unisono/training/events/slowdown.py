"""One thing that makes steps slower than they could be, in words: what was found in their times."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from unisono.runtime.notices import percent


class SlowdownCause(enum.Enum):
    """What costs time."""

    WORKER = "slow worker"
    UNEVEN = "uneven shards"
    LOADING = "loading"
    BETWEEN = "between steps"
    BUSY = "busy machine"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One thing that costs time."""

    cause: SlowdownCause
    cost: float  # of the steps' time
    sentence: str
    remedy: str  # what to do
    rank: int | None = None  # of the worker that it is about; None: no single one

    @property
    def line(self) -> str:
        """All of it."""
        return f"{self.sentence}{self.costs}: {self.remedy}"

    @property
    def costs(self) -> str:
        """What it costs, to stand behind the sentence."""
        return f", which costs {percent(self.cost)} of the time"
