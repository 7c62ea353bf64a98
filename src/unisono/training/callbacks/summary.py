"""What a call of ``fit`` did, for the caller and, as one line, for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.runtime.notices import decimal, plural


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Summary(list[dict[str, Any]]):
    """The history of a run, with what a call of ``fit`` did in it; its text is the summary line.

    A list with a dict for each epoch of the run, including those before this call or a restart, and
    one that has begun: its number as ``"epoch"``, the number of steps then done as ``"step"``, the
    mean loss and other scalars over the samples (or the true weight) of the epoch, and the newest
    validation that was due in it, as ``"validation/loss"``. It is the same on every worker, and in
    a run that was stopped and resumed. ``pandas.DataFrame(history)`` makes a table of it. It keeps
    the newest 10,000 epochs.

    Attributes:
        steps: steps of this call.
        samples: samples of this call.
        seconds: wall time of this call, in seconds, without validation; NaN if it is unknown,
            because no worker that has seen steps is left.
        shards: S.
        workers: W.
        digest: the digest of the final state.
        means: the means of the last step.
        validation: the last validation, if there was one.
        workers_at_end: number of workers left; None if unknown.
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
            pace = "in an unknown time"
        return (
            f"{self.steps:,} steps, {self.samples:,} samples {pace}, "
            f"{plural(self.shards, 'shard')} on {plural(self.workers, 'worker')}{lost}, "
            f"digest {self.digest[:16]}"
        )


def scalars_text(means: Mapping[str, Any]) -> str:
    """Return scalars as text, ``loss 0.1234, correct 987``; lists would fill the screen."""
    scalars = {name: value for name, value in means.items() if not isinstance(value, (list, dict))}
    return ", ".join(
        f"{name} {value if isinstance(value, int) else decimal(value)}"
        for name, value in scalars.items()
    )
