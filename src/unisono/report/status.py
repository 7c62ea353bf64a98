"""How does a run stand now, as far as its events say? What was last of everything, kept small."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.plan.shards import assign
from unisono.report.events import (
    Checkpoint,
    Evaluation,
    Event,
    Start,
    StepDone,
    WentBack,
    Workers,
)
from unisono.report.phases import Spent, slowest
from unisono.report.process_status import Named
from unisono.report.recent import Recent
from unisono.report.run_progress import RunProgress

MAX_WORKERS = 256


@dataclass(frozen=True)
class Trouble:
    """The newest thing that happened to the workers of a fit, and how many it has lost so far."""

    time_unix_s: float
    text: str
    num_lost: int


class RunStatus:
    """How a run stands, as far as its events have been added. Final.

    Attributes:
        course: what it has come to.
        named: the processes of those who compute, and of those who were lost last.
        last_step_by_rank: the last step that each worker ended.
        trouble: the newest thing that happened to workers.
        evaluation: the newest.
        checkpoint: the newest.
        recent: the newest steps with the workers that there are now.
    """

    def __init__(self) -> None:
        self.course = RunProgress()
        self.named: dict[int, Named] = {}
        self.last_step_by_rank: dict[int, int] = {}
        self.trouble: Trouble | None = None
        self.evaluation: Evaluation | None = None
        self.checkpoint: Checkpoint | None = None
        self.recent = Recent()

    def add(self, event: Event) -> None:
        """Add the next event."""
        self.course.add(event)
        if isinstance(event, StepDone):
            for rank in event.ranks[:MAX_WORKERS]:
                self.last_step_by_rank[rank] = event.step
            self.recent.add(event)
        elif isinstance(event, Start):
            self.named, self.last_step_by_rank, self.trouble = {}, {}, None
            self._begin_anew(event)
        elif isinstance(event, Workers):
            self._trouble(event)
            self._begin_anew(event)
        elif isinstance(event, WentBack):
            self._add_went_back(event)
        elif isinstance(event, Evaluation):
            self.evaluation = event
        elif isinstance(event, Checkpoint):
            self.checkpoint = event

    def _begin_anew(self, event: Start | Workers) -> None:
        """Others compute: name them, and forget how fast it was before."""
        for rank, pid in list(zip(event.ranks, event.pids, strict=False))[:MAX_WORKERS]:
            if pid is None:
                self.named.pop(rank, None)  # not the process of that rank which was there before
            else:
                self.named[rank] = Named(pid, event.time_unix_s)
        self.recent = Recent()

    def _trouble(self, event: Workers) -> None:
        # That another has come in its place is less than why it was lost.
        if event.lost or self.trouble is None:
            num_lost = len(event.lost) + (self.trouble.num_lost if self.trouble else 0)
            self.trouble = Trouble(event.time_unix_s, event.in_words, num_lost)

    def _add_went_back(self, event: WentBack) -> None:
        if self.trouble is not None and event.from_step is not None:
            text = f"{self.trouble.text}; steps {event.step} to {event.from_step - 1} came again"
            self.trouble = replace(self.trouble, text=text)

    def slow(self) -> tuple[int, float] | None:
        """Return who computes longest for a shard, and how many times what is usual."""
        start, ranks = self.course.latest, self.course.ranks
        shards = _num_shards(start.shards if start else None, len(ranks))
        by_rank = {
            rank: Spent([seconds / shards[ranks.index(rank)] for seconds in spent.phases_s], n)
            for rank, spent in self.recent.by_rank.items()
            if rank in ranks and (n := spent.num_steps)
        }
        return slowest(by_rank)


def _num_shards(shards: int | None, num_workers: int) -> list[int]:
    """Count the shards of each worker; the first ones have more where it does not divide."""
    if shards is None or not 0 < num_workers <= shards <= 1 << 20:
        return [1] * num_workers
    return [len(part) for part in assign(shards, num_workers)]
