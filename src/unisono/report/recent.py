"""How fast are the newest steps, and where does their time go?

They are kept small, so that the last ten seconds, or ten steps, count. ::

    the last ten buckets   │ step step step │ step │ step step step │…
                            └ a second, or one step that took longer
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from unisono.report.events import StepDone
from unisono.report.phases import Spent, add_up, spent_by_rank

MAX_BUCKETS = 10
BUCKET_S = 1.0


@dataclass
class Bucket:
    """Neighbouring steps. Some between them may not have been read."""

    first: StepDone
    last: StepDone
    num_read: int
    num_samples: int
    by_rank: dict[int, Spent]

    def absorb(self, step: StepDone) -> None:
        """Take in the next step."""
        self.last = step
        self.num_read += 1
        self.num_samples += step.num_samples or 0
        add_up(self.by_rank, spent_by_rank(step))


class Recent:
    """The newest steps: how fast, and where the time goes. Final."""

    def __init__(self) -> None:
        self.buckets: deque[Bucket] = deque(maxlen=MAX_BUCKETS)

    def add(self, step: StepDone) -> None:
        """Add the next step; with one that comes again, what was before is old."""
        last = self.buckets[-1] if self.buckets else None
        if last is not None and step.step <= last.last.step:
            self.buckets.clear()
            last = None
        # Written so that a time that is not a number, or goes back, begins another bucket.
        if last is not None and 0 <= step.time_unix_s - last.first.time_unix_s < BUCKET_S:
            last.absorb(step)
        else:
            self.buckets.append(
                Bucket(step, step, 1, step.num_samples or 0, dict(spent_by_rank(step)))
            )

    @property
    def num_steps(self) -> int:
        """How many steps there are from the first to the last."""
        if not self.buckets:
            return 0
        return self.buckets[-1].last.step - self.buckets[0].first.step + 1

    @property
    def steps_per_s(self) -> float | None:
        """How many steps are done in a second, evaluations between them included."""
        if not self.buckets:
            return None
        first, last = self.buckets[0].first, self.buckets[-1].last
        seconds = last.time_unix_s - first.time_unix_s
        if last.step > first.step and seconds > 0:
            return (last.step - first.step) / seconds
        return 1 / last.seconds if last.seconds else None

    @property
    def samples_per_s(self) -> float | None:
        """How many samples all workers compute in a second."""
        num_samples = sum(bucket.num_samples for bucket in self.buckets)
        if not num_samples or (rate := self.steps_per_s) is None:
            return None
        return rate * num_samples / sum(bucket.num_read for bucket in self.buckets)

    @property
    def by_rank(self) -> dict[int, Spent]:
        """What each worker spent."""
        found: dict[int, Spent] = {}
        for bucket in self.buckets:
            add_up(found, bucket.by_rank)
        return found
