"""What a call of ``fit`` did, for the caller and, as one line, for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.runtime.notices import plural


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Summary(list[dict[str, Any]]):
    """The history of a run, with what a call of ``fit`` did in it; its text is the summary line.

    A list with a dict for each epoch of the run, also those before this call or a restart, and for
    one that has begun: its number as ``"epoch"``, the steps that the run had done then as
    ``"step"``, the mean loss and other scalars over the samples (or the true weight) of the epoch,
    and what the newest validation that was due in it found, as ``"validation/loss"``. It is the
    same on every worker, and in a run that was stopped and resumed. ``pandas.DataFrame(history)``
    makes a table of it. Of more than 10,000 epochs, it has the newest.

    Attributes:
        steps: steps of this call.
        samples: samples of this call.
        seconds: wall time of this call, in seconds, validation left out; NaN where nobody knows,
            as no worker was left of those who have seen steps.
        shards: S.
        workers: W.
        digest: of the state at the end.
        means: of the last step.
        validation: the last validation, if there was one.
        workers_at_end: how many of them were left; None where nobody knows.
    """

    steps: int
    samples: int
    seconds: float
    shards: int
    workers: int
    digest: str
    means: Mapping[str, float]
    validation: Mapping[str, Any] | None
    workers_at_end: int | None = None

    @property
    def samples_per_second(self) -> float:
        """The rate of all workers together."""
        return self.samples / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        left = self.workers_at_end or self.workers
        lost = f" ({left} at the end)" if left < self.workers else ""
        pace = f"in {self.seconds:.1f} s: {self.samples_per_second:,.0f} samples/s"
        if math.isnan(self.seconds):
            pace = "in a time that nobody knows"
        return (
            f"{self.steps:,} steps, {self.samples:,} samples {pace}, "
            f"{plural(self.shards, 'shard')} on {plural(self.workers, 'worker')}{lost}, "
            f"digest {self.digest[:16]}"
        )


def told(means: Mapping[str, Any]) -> str:
    """Write scalars for a person, ``loss 0.1234, correct 987``; more would fill the screen."""
    scalars = {name: value for name, value in means.items() if not isinstance(value, (list, dict))}
    return ", ".join(
        f"{name} {value if isinstance(value, int) else format(value, '.4f')}"
        for name, value in scalars.items()
    )
