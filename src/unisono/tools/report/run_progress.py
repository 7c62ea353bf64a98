"""The progress of a run: who works, how far it is, how it ended, and do its processes exist?

Both the page and the live view read events here. ::

    events       start   step 0 … 9   workers   went_back   step 10   end
    num_done     0       10           10        8           11        11
    ranks        0 1     0 1          0         0           0         0

Steps that are repeated have their lines already, so each step comes once.

An event file identifies processes by ID, on a host. An ID is trusted only on that host, and only
for a process that is as old as the line with it, because IDs are reused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

import psutil

from unisono.runtime.notices import plural
from unisono.training.events.events import (
    CheckpointRequest,
    End,
    Evaluation,
    Event,
    Failure,
    Interrupted,
    Start,
    StepEvent,
    WentBack,
    Workers,
)

MAX_WORKERS = 256  # whose processes are recorded


@dataclass(frozen=True)
class Mark:
    """Something that happened once, at a step."""

    step: int
    time_unix_s: float
    text: str


def said_of(event: Event) -> str | None:
    """Return what a notable event reports; None for a usual one."""
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
            return f"{words}: {from_step - step} were repeated, with the same result"
        case Interrupted():
            return f"interrupted {event.in_words}"
        case Failure(rank=rank):
            whose = "" if rank is None else f"worker {rank}: "
            return f"{whose}{event.in_words}"
        case End(step=step, stopped_early=True):
            return f"stopped early after {step} steps"
    return None


@final
@dataclass
class RunProgress:
    """The progress of a run, as far as its events have been added."""

    first: Start | None = None  # describes the run
    latest: Start | None = None
    num_starts: int = 0  # number of fits that began
    ended: End | Failure | None = None  # None: it has not, according to the events
    num_done: int = 0  # steps done
    num_repeated: int = 0  # steps that are being repeated, of which no lines come
    epoch: int | None = None  # of the last of them, counted from 0
    last_step: StepEvent | None = None  # the last step of the latest fit
    num_steps: int = 0  # steps in the events
    evaluation: Evaluation | None = None  # the newest
    checkpoint: CheckpointRequest | None = None  # the newest
    num_checkpoints: int = 0
    ranks: tuple[int, ...] = ()  # the workers that compute
    lost: set[int] = field(default_factory=set)  # in the latest fit, and not replaced
    named: dict[int, Named] = field(default_factory=dict)  # processes, also of lost workers
    trouble: Mark | None = None  # the newest event about workers of the latest fit
    num_lost: int = 0  # workers
    began_unix_s: float = math.nan  # time of the first line
    last_unix_s: float = math.nan  # time of the last line
    seconds: float = 0.0  # of all fits, without the time between them

    def add(self, event: Event) -> None:
        """Add the next event."""
        if math.isfinite(event.time_unix_s):
            passed_s = event.time_unix_s - self.last_unix_s
            if passed_s > 0 and not isinstance(event, Start):
                self.seconds += passed_s
            if math.isnan(self.began_unix_s):
                self.began_unix_s = event.time_unix_s
            self.last_unix_s = event.time_unix_s
        match event:
            case StepEvent():
                self._add_step(event)
            case Start():
                self._add_start(event)
            case Workers():
                self._add_workers(event)
            case WentBack(step=step, from_step=from_step):
                self.num_done = step
                self.num_repeated = max(0, (from_step or step) - step)
                if self.trouble is not None and from_step is not None:
                    text = f"{self.trouble.text}; steps {step} to {from_step - 1} were repeated"
                    self.trouble = replace(self.trouble, text=text)
            case Evaluation():
                self.evaluation = event
            case CheckpointRequest():
                self.checkpoint = event
                self.num_checkpoints += 1
            case End() | Failure():
                self.num_done = event.step
                # Several workers may fail for the same reason; the first message counts.
                if not (isinstance(event, Failure) and isinstance(self.ended, Failure)):
                    self.ended = event

    def _add_start(self, start: Start) -> None:
        self.first = self.first or start
        self.latest, self.ended = start, None
        self.num_starts += 1
        self.num_done, self.epoch, self.last_step = start.step, start.epoch, None
        self.ranks = start.ranks or self.ranks
        self.lost, self.named, self.trouble = set(), {}, None
        self._name(start)

    def _add_step(self, step: StepEvent) -> None:
        # A replacement may fail while the others continue; a step before that may be written later.
        if isinstance(self.ended, Failure) and step.time_unix_s > self.ended.time_unix_s:
            self.ended = None
        self.num_done, self.epoch, self.last_step = step.step + 1, step.epoch, step
        self.num_repeated = 0
        self.ranks = step.ranks or self.ranks
        self.num_steps += 1

    def _add_workers(self, event: Workers) -> None:
        self.ranks = event.ranks or self.ranks
        self.lost = (self.lost | set(event.lost)) - set(event.ranks)
        self.num_lost += len(event.lost)
        # Why a worker was lost matters more than that it was replaced.
        if event.lost or self.trouble is None:
            self.trouble = Mark(event.step, event.time_unix_s, event.in_words)
        self._name(event)

    def _name(self, event: Start | Workers) -> None:
        for rank, pid in list(zip(event.ranks, event.pids, strict=False))[:MAX_WORKERS]:
            if pid is None:
                self.named.pop(rank, None)  # not the rank's previous process
            else:
                self.named[rank] = Named(pid, event.time_unix_s)


_SLACK_S = 2.0  # between the kernel's clock and the one that events are written by
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True)
class Named:
    """A process as identified by an event."""

    pid: int
    at_unix_s: float


@dataclass(frozen=True)
class Process:
    """The state of a process."""

    state: str  # "running", "stopped", "gone", or "unknown"
    memory_bytes: int | None = None  # in memory, with what it shares


UNKNOWN = Process("unknown")
GONE = Process("gone")


def processes_of(named: Mapping[int, Named]) -> dict[int, Process]:
    """Return the state of each rank's process."""
    return {rank: _process(name) for rank, name in named.items()}


def _process(name: Named) -> Process:
    try:
        process = psutil.Process(name.pid)
        with process.oneshot():
            state = process.status()
            if state in _ENDED or process.create_time() > name.at_unix_s + _SLACK_S:
                return GONE
            memory_bytes = process.memory_info().rss
    except psutil.NoSuchProcess:
        # If processes of other users are hidden, so is process 1.
        return GONE if psutil.pid_exists(1) else UNKNOWN
    except psutil.Error:
        return UNKNOWN
    return Process("stopped" if state in _STOPPED else "running", memory_bytes)
