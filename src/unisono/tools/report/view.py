"""What is the state of a run now? Its status, its processes and the clock, in words. Pure.

Speeds and times are those of the last hundred steps, of which some may not have been read. All text
from files leaves this module as plain text on one line; ``top.py`` arranges it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import final

from unisono.runtime.notices import amount, duration, plural
from unisono.tools.report.history import PhaseTimes
from unisono.tools.report.run_progress import GONE, MAX_WORKERS, UNKNOWN, Process, RunProgress
from unisono.tools.report.text import name, plain, program_of
from unisono.training.events.events import (
    End,
    Event,
    Failure,
    Interrupted,
    Slowdown,
    SlowdownCause,
    Start,
    StepEvent,
    Workers,
)

RECENT_STEPS = 100
USUAL = ("running", "ended", "unknown")  # states of a worker that are not notable


@final
class RunStatus:
    """The status of a run, as far as its events have been added."""

    def __init__(self) -> None:
        self.progress = RunProgress()
        # the newest steps, by the current workers
        self.recent: deque[StepEvent] = deque(maxlen=RECENT_STEPS)
        # device memory that tensors of each worker last used, in bytes; empty on CPUs
        self.memory: dict[int, int | None] = {}
        self.findings: tuple[Slowdown, ...] = ()  # what slows them, the costliest first

    def add(self, event: Event) -> None:
        """Add the next event."""
        self.progress.add(event)
        if isinstance(event, StepEvent):
            self.recent.append(event)
            sizes = zip(event.ranks, event.allocated_bytes, strict=False)
            self.memory |= dict(list(sizes)[:MAX_WORKERS])
        elif isinstance(event, Start | Workers):
            self.recent.clear()  # the workers have changed
            self.memory.clear()

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second, including the time of evaluations between them."""
        if not self.recent:
            return None
        first, last = self.recent[0], self.recent[-1]
        # Their own times are those of a clock that is never set.
        times = [step.seconds or math.nan for step in self.recent][1:]
        seconds = sum(times) * (last.step - first.step) / max(1, len(times))
        if math.isnan(seconds):
            seconds = last.time_unix_s - first.time_unix_s
        if last.step > first.step and seconds > 0:
            return (last.step - first.step) / seconds
        return 1 / last.seconds if last.seconds else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of all workers together."""
        num_samples = sum(step.num_samples or 0 for step in self.recent)
        if not num_samples or (rate := self.steps_per_s) is None:
            return None
        return rate * num_samples / len(self.recent)


@dataclass(frozen=True)
class WorkerLine:
    """One worker."""

    rank: int
    pid: int | None  # None: unknown
    state: str  # one word
    memory_bytes: int | None = None  # of its process
    shares: Mapping[str, float] | None = None  # the fraction of its time that each phase took
    work_s: float | None = None  # its time per step, without waiting
    is_slow: bool = False  # whether it is slow
    device_bytes: int | None = None  # device memory of its tensors; None on CPUs


def worker_lines(status: RunStatus, processes: Mapping[int, Process]) -> Iterator[WorkerLine]:
    """Yield a line per worker that computes, or was lost and not replaced, by rank."""
    times = PhaseTimes()
    times.add(status.recent)
    spent = times.by_rank
    slow = {one.rank for one in status.findings if one.cause is SlowdownCause.WORKER}
    for rank in sorted({*status.progress.ranks, *status.progress.lost}):
        named, process = status.progress.named.get(rank), processes.get(rank, UNKNOWN)
        state = "ended" if process == GONE and status.progress.ended else process.state
        yield WorkerLine(
            rank,
            None if named is None else named.pid,
            "lost" if rank in status.progress.lost else state,
            process.memory_bytes,
            shares=spent[rank].shares if rank in spent else None,
            work_s=spent[rank].working_s if rank in spent else None,
            is_slow=rank in slow,
            device_bytes=status.memory.get(rank),
        )


STILL_S = 3.0  # the view reports that no step has ended for so long
STILL_STEPS = 5  # …unless so many steps take longer
STAYS_S = 5.0  # wait so long for the program's next `fit`
MAX_MEANS = 4
_AGES_S = 1e10


class Condition(Enum):
    """The condition of a run; the value is the word for it."""

    AWAITED = "not begun"
    RUNNING = "running"
    STILL = "standing still"
    ENDED = "ended"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True)
class View:
    """The live view of a run. Each text is one line; those of a tuple may share a line."""

    condition: Condition
    title: str  # the command
    facts: tuple[str, ...] = ()  # about the run
    num_done: int = 0
    end_step: int | None = None  # None: unknown
    position: tuple[str, ...] = ()  # position in the run
    numbers: tuple[str, ...] = ()  # of the last step
    kept: tuple[str, ...] = ()  # the newest evaluation, and checkpoint request
    trouble: str = ""  # what happened to workers
    message: str = ""  # the last words, or why nothing moves
    workers: tuple[WorkerLine, ...] = ()  # computing and lost workers, by rank
    slowness: str = ""  # the largest slowdown
    is_over: bool = False  # whether there will be no more events


def see(
    status: RunStatus, processes: Mapping[int, Process], now_unix_s: float, *, is_held: bool = True
) -> View:
    """Describe how a run stands, given what each rank's process does, as far as known.

    `is_held`: whether a process may have locked the directory.
    """
    progress, start = status.progress, status.progress.latest
    if start is None:
        return View(Condition.AWAITED, "", message="waiting for the run to begin")
    states = {processes.get(rank, UNKNOWN).state for rank in progress.ranks}
    silent_s = _since(progress.last_unix_s, now_unix_s)
    known = (progress.last_step or start, progress.evaluation)
    times = [one.time_unix_s for one in known if one and not math.isnan(one.time_unix_s)]
    still_s = _since(max(times, default=-math.inf), now_unix_s)
    condition = _condition(status, states, silent_s, still_s, is_held)
    is_ended = condition in (Condition.ENDED, Condition.FAILED)
    is_there = bool(states & {"running", "stopped"})
    until_s = progress.last_unix_s if is_ended or condition is Condition.GONE else now_unix_s
    return View(
        condition,
        name(" ".join(program_of(start.command))) or "a run",  # without the command that started it
        facts=tuple(_facts(progress, start, condition, _since(start.time_unix_s, until_s))),
        num_done=progress.num_done,
        end_step=start.end_step,
        position=tuple(_position(status, start, condition)),
        numbers=tuple(_numbers(status)),
        kept=tuple(_kept(progress, now_unix_s)),
        trouble=_trouble(progress, now_unix_s),
        message=_last_words(progress) or _why_still(progress, condition, still_s, now_unix_s),
        workers=tuple(worker_lines(status, processes)),
        slowness=status.findings[0].sentence + status.findings[0].costs if status.findings else "",
        is_over=(condition is Condition.GONE and silent_s > STAYS_S)
        or (is_ended and (not is_there or silent_s > STAYS_S)),
    )


def _condition(
    status: RunStatus, states: Set[str], silent_s: float, still_s: float, is_held: bool
) -> Condition:
    ended, rate = status.progress.ended, status.steps_per_s
    if ended is not None:
        return Condition.FAILED if isinstance(ended, Failure) else Condition.ENDED
    # The process that holds the directory may start a replacement.
    if states == {GONE.state} and (silent_s > STAYS_S or not is_held):
        return Condition.GONE
    num_steps = STILL_STEPS + status.progress.num_repeated
    patience_s = max(STILL_S, num_steps / rate if rate else 0.0)
    return Condition.STILL if still_s > patience_s else Condition.RUNNING


def _since(unix_s: float, now_unix_s: float) -> float:
    """Return the seconds since then; 0 for times in the future, or no time at all."""
    passed_s = now_unix_s - unix_s
    return passed_s if passed_s > 0 else 0.0


def _facts(
    progress: RunProgress, start: Start, condition: Condition, lasted_s: float
) -> Iterator[str]:
    yield f"{_condition_word(progress, condition)}, {_whole(lasted_s)}"
    yield plural(len(progress.ranks), "worker")
    if start.shards is not None:
        yield plural(start.shards, "shard")
    if start.host:
        yield f"on {name(start.host)}"


def _condition_word(progress: RunProgress, condition: Condition) -> str:
    if isinstance(progress.ended, Interrupted):
        return "interrupted"
    if isinstance(progress.ended, End) and progress.ended.stopped_early:
        return "stopped early"
    return condition.value


def _position(status: RunStatus, start: Start, condition: Condition) -> Iterator[str]:
    progress, rate = status.progress, status.steps_per_s
    if progress.epoch is not None:
        of = ""
        if start.steps_per_epoch and start.end_step is not None:
            of = f" of {math.ceil(start.end_step / start.steps_per_epoch):,}"
        yield f"epoch {progress.epoch + 1:,}{of}"
    if rate and start.end_step is not None and condition is Condition.RUNNING:
        yield f"{_whole(max(start.end_step - progress.num_done, 0) / rate)} to go"


def _numbers(status: RunStatus) -> Iterator[str]:
    step, ended = status.progress.last_step, status.progress.ended
    if step is None:
        return
    first, *others = _means(step.means) or [""]
    rate = ended.samples_per_second if isinstance(ended, End) else status.samples_per_s
    if first:
        yield first
    if rate is not None:
        yield f"{rate:,.0f} samples/s" if 10 <= rate < 1e12 else f"{rate:.2g} samples/s"
    yield from others
    if step.learning_rates:
        yield f"learning rate {amount(step.learning_rates[0])}"
    if step.gradient_norm is not None:
        yield f"gradient norm {amount(step.gradient_norm)}"


def _kept(progress: RunProgress, now_unix_s: float) -> Iterator[str]:
    if (found := progress.evaluation) is not None:
        yield f"validation at step {found.step:,}: {', '.join(_means(found.means))}"
    if (kept := progress.checkpoint) is not None:
        yield f"checkpoint begun at step {kept.step:,}, {_ago(kept.time_unix_s, now_unix_s)}"


def _means(means: Mapping[str, float]) -> list[str]:
    return [f"{name(key)} {amount(mean)}" for key, mean in means.items()][:MAX_MEANS]


def _trouble(progress: RunProgress, now_unix_s: float) -> str:
    trouble = progress.trouble
    if trouble is None:
        return ""
    said = f"{_line(trouble.text)}, {_ago(trouble.time_unix_s, now_unix_s)}"
    if progress.num_lost > 1:
        return f"{progress.num_lost:,} workers lost; the last: {said}"
    return said


def _last_words(progress: RunProgress) -> str:
    match progress.ended:
        case Interrupted() as ended:
            return f"interrupted {_line(ended.in_words)} after {plural(ended.step, 'step')}"
        case Failure() as ended:
            whose = "the run" if ended.rank is None else f"worker {ended.rank}"
            return f"{whose} failed at step {ended.step:,}: {_line(ended.in_words)}"
        case End() as ended:
            digest = f", digest {name(ended.digest)[:16]}" if ended.digest else ""
            return f"{plural(ended.step, 'step')} in {duration(ended.seconds)}{digest}"
    return ""


def _why_still(
    progress: RunProgress, condition: Condition, still_s: float, now_unix_s: float
) -> str:
    if condition is Condition.GONE:
        return (
            "no worker is there any more, so the run was interrupted or killed: last heard of "
            f"{_ago(progress.last_unix_s, now_unix_s)}"
        )
    if condition is Condition.STILL:
        yet = " yet" if progress.last_step is None else ""
        return f"no step{yet} for {_whole(still_s)}: `unisono where` shows who waits for whom"
    return ""


def _line(text: str) -> str:
    return " ".join(plain(text).split())


def _whole(seconds: float) -> str:
    """Return a time in whole seconds or longer units, so that the view does not flicker."""
    return duration(float(round(min(seconds, _AGES_S)))) if seconds >= 1 else "0 s"


def _ago(unix_s: float, now_unix_s: float) -> str:
    return f"{_whole(_since(unix_s, now_unix_s))} ago" if math.isfinite(unix_s) else "some time ago"
