"""How does a run stand, as far as its events say?

One pass over events, old and new, kept small: what was last, and the newest steps. ::

    the last ten buckets   │ step step step │ step │ step step step │…
                            └ a second, or one step that took longer
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from unisono.plan.shards import assign
from unisono.report.events import (
    PHASES,
    Checkpoint,
    End,
    Evaluation,
    Event,
    Failure,
    Start,
    StepDone,
    WentBack,
    Workers,
)
from unisono.report.phases import Spent, slowest, spent_by_rank
from unisono.report.processes import Named

MAX_BUCKETS = 10
BUCKET_S = 1.0
MAX_WORKERS = 256


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
        _add_spent(self.by_rank, spent_by_rank(step))


class Recent:
    """The newest steps: how fast, and where the time goes."""

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
            _add_spent(found, bucket.by_rank)
        return found


@dataclass(frozen=True)
class Trouble:
    """Something that happened to the workers."""

    time_unix_s: float
    text: str


class Standing:
    """How a run stands, as far as its events have been added.

    Attributes:
        start: the latest start; None where no run has begun.
        ended: how it ended; None while it has not, as far as events say.
        num_done: steps done.
        epoch: the epoch of the last of them, counted from 0.
        last_step: the last step that was read.
        last_event_unix_s: when the last line was written.
        ranks: who computes.
        named: the processes of those, and of those who were lost last.
        last_step_by_rank: the last step that each worker ended.
        lost: those who were lost and not replaced.
        num_lost: how many workers this fit has lost.
        trouble: the newest thing that happened to workers.
        evaluation: the newest.
        checkpoint: the newest.
        recent: the newest steps with the workers that there are now.
    """

    def __init__(self) -> None:
        self.start: Start | None = None
        self.ended: End | Failure | None = None
        self.num_done = 0
        self.epoch: int | None = None
        self.last_step: StepDone | None = None
        self.last_event_unix_s = math.nan
        self.ranks: tuple[int, ...] = ()
        self.named: dict[int, Named] = {}
        self.last_step_by_rank: dict[int, int] = {}
        self.lost: set[int] = set()
        self.num_lost = 0
        self.trouble: Trouble | None = None
        self.evaluation: Evaluation | None = None
        self.checkpoint: Checkpoint | None = None
        self.recent = Recent()

    def add(self, event: Event) -> None:
        """Add the next event."""
        if math.isfinite(event.time_unix_s):
            self.last_event_unix_s = event.time_unix_s
        if isinstance(event, StepDone):
            self._add_step(event)
        elif isinstance(event, Start):
            self._add_start(event)
        elif isinstance(event, Workers):
            self._add_workers(event)
        elif isinstance(event, WentBack):
            self._add_went_back(event)
        elif isinstance(event, Evaluation):
            self.evaluation = event
        elif isinstance(event, Checkpoint):
            self.checkpoint = event
        else:
            self._add_last(event)

    def _add_start(self, start: Start) -> None:
        self.start, self.ended = start, None
        self.num_done, self.epoch = start.step, start.epoch
        self.last_step = None
        self.named, self.last_step_by_rank = {}, {}
        self.lost, self.num_lost, self.trouble = set(), 0, None
        self._name(start)
        self.recent = Recent()

    def _add_step(self, step: StepDone) -> None:
        if isinstance(self.ended, Failure):
            self.ended = None  # a replacement may fail, and the others go on
        self.last_step, self.num_done, self.epoch = step, step.step + 1, step.epoch
        self.ranks = step.ranks or self.ranks
        for rank in step.ranks[:MAX_WORKERS]:
            self.last_step_by_rank[rank] = step.step
        self.recent.add(step)

    def _add_workers(self, event: Workers) -> None:
        self._name(event)
        self.lost = (self.lost | set(event.lost)) - set(event.ranks)
        self.num_lost += len(event.lost)
        # That another has come in its place is less than why it was lost.
        if event.lost or self.trouble is None:
            self.trouble = Trouble(event.time_unix_s, event.in_words)
        self.recent = Recent()

    def _add_went_back(self, event: WentBack) -> None:
        self.num_done = event.step
        if self.trouble is not None and event.from_step is not None:
            text = f"{self.trouble.text}; steps {event.step} to {event.from_step - 1} came again"
            self.trouble = replace(self.trouble, text=text)

    def _add_last(self, event: End | Failure) -> None:
        # Several workers may fail of the same; the first word counts.
        if not isinstance(self.ended, Failure):
            self.ended = event
        self.num_done = event.step

    def _name(self, event: Start | Workers) -> None:
        self.ranks = event.ranks or self.ranks
        for rank, pid in list(zip(event.ranks, event.pids, strict=False))[:MAX_WORKERS]:
            if pid is None:
                self.named.pop(rank, None)  # not the process of that rank which was there before
            else:
                self.named[rank] = Named(pid, event.time_unix_s)

    def slow(self) -> tuple[int, float] | None:
        """Return who computes longest for a shard, and how many times what is usual."""
        shards = _num_shards(self.start.shards if self.start else None, len(self.ranks))
        by_rank = {
            rank: Spent([seconds / shards[self.ranks.index(rank)] for seconds in spent.phases_s], n)
            for rank, spent in self.recent.by_rank.items()
            if rank in self.ranks and (n := spent.num_steps)
        }
        return slowest(by_rank)


def shares(spent: Spent) -> Mapping[str, float]:
    """Return the part of a worker's time that each phase took; empty if there was none."""
    total_s = spent.total_s
    if total_s <= 0:
        return {}
    return {name: spent.phases_s[i] / total_s for i, name in enumerate(PHASES)}


def _num_shards(shards: int | None, num_workers: int) -> list[int]:
    """Count the shards of each worker; the first ones have more where it does not divide."""
    if shards is None or not 0 < num_workers <= shards <= 1 << 20:
        return [1] * num_workers
    return [len(part) for part in assign(shards, num_workers)]


def _add_spent(to: dict[int, Spent], more: Mapping[int, Spent]) -> None:
    for rank, spent in more.items():
        to.setdefault(rank, Spent([0.0] * len(PHASES), 0)).add(spent)
