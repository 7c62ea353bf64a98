"""The live view of a run: its status, its processes and the clock, put into words.

A pure function, :func:`see`; ``drawing.py`` finds places for it on a terminal. Whatever a file says
comes out of here as plain text on one line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum

from unisono.quantities import amount, duration, plural
from unisono.report.events import End, Failure, Interrupted, Start
from unisono.report.process_status import UNKNOWN, Process, ProcessState
from unisono.report.run_progress import RunProgress
from unisono.report.status import RunStatus, WorkerLine, worker_lines
from unisono.report.text import name, plain, program_of

STILL_S = 3.0  # no step for so long is worth saying
STILL_STEPS = 5  # …unless steps take as long
STAYS_S = 5.0  # a program may call `fit` again; so long it is waited for
MAX_MEANS = 4
_AGES_S = 1e10


class Condition(Enum):
    """How a run is; the value is the word for it."""

    AWAITED = "not begun"
    RUNNING = "running"
    STILL = "no step"
    ENDED = "ended"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True)
class View:
    """The live view of a run. Each text is one line; those of a tuple may share a line."""

    condition: Condition
    title: str  # the command
    facts: tuple[str, ...] = ()  # what it is
    num_done: int = 0
    end_step: int | None = None  # None where nobody knows
    position: tuple[str, ...] = ()  # where in the run that is
    numbers: tuple[str, ...] = ()  # of the last step
    kept: tuple[str, ...] = ()  # the newest evaluation and checkpoint, which may not be written
    trouble: str = ""  # what has become of workers
    message: str = ""  # the last words, or why nothing moves
    workers: tuple[WorkerLine, ...] = ()  # those who compute, and those who were lost, by rank
    slowness: str = ""  # what slows the steps most
    is_over: bool = False  # whether nothing more will come


def see(status: RunStatus, processes: Mapping[int, Process], now_unix_s: float) -> View:
    """Put into words how a run stands.

    Args:
        status: what its events say.
        processes: what each rank's process does, as far as anybody can tell from here.
        now_unix_s: what time it is.
    """
    progress, start = status.progress, status.progress.latest
    if start is None:
        return View(Condition.AWAITED, "", message="waiting for the run to begin")
    states = {processes.get(rank, UNKNOWN).state for rank in progress.ranks}
    silent_s = _since(progress.last_unix_s, now_unix_s)
    known = (progress.last_step or start, progress.evaluation)
    times = [one.time_unix_s for one in known if one and not math.isnan(one.time_unix_s)]
    still_s = _since(max(times, default=-math.inf), now_unix_s)
    condition = _condition(status, states, silent_s, still_s)
    is_ended = condition in (Condition.ENDED, Condition.FAILED)
    is_there = bool(states & {ProcessState.RUNNING, ProcessState.STOPPED})
    until_s = progress.last_unix_s if is_ended or condition is Condition.GONE else now_unix_s
    return View(
        condition,
        _title(start),
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
        is_over=condition is Condition.GONE or (is_ended and (not is_there or silent_s > STAYS_S)),
    )


def _condition(
    status: RunStatus, states: Set[ProcessState], silent_s: float, still_s: float
) -> Condition:
    ended, rate = status.progress.ended, status.steps_per_s
    if ended is not None:
        return Condition.FAILED if isinstance(ended, Failure) else Condition.ENDED
    if states == {ProcessState.GONE} and silent_s > STAYS_S:
        return Condition.GONE
    patience_s = max(STILL_S, STILL_STEPS / rate if rate else 0.0)
    return Condition.STILL if still_s > patience_s else Condition.RUNNING


def _since(unix_s: float, now_unix_s: float) -> float:
    """Return the seconds since then; 0 for what is to come, or for no time at all."""
    passed_s = now_unix_s - unix_s
    return passed_s if passed_s > 0 else 0.0


def _title(start: Start) -> str:
    """Return the program with its arguments; who started it does not matter here."""
    return name(" ".join(program_of(start.command))) or "a run"


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
    match progress.ended:
        case End(stopped_early=True):
            return "stopped early"
        case Interrupted():
            return "interrupted"
    return "standing still" if condition is Condition.STILL else condition.value


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
    """Return a time in whole seconds or longer units, so that it does not flicker."""
    return duration(float(round(min(seconds, _AGES_S)))) if seconds >= 1 else "0 s"


def _ago(unix_s: float, now_unix_s: float) -> str:
    return f"{_whole(_since(unix_s, now_unix_s))} ago" if math.isfinite(unix_s) else "some time ago"
