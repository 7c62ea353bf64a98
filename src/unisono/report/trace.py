"""The steps of each worker as trace events, which Perfetto and chrome://tracing show.

The format is Chrome's "Trace Event Format", its object form: times and durations in microseconds,
``X`` a slice with a duration, ``i`` an instant, ``C`` a counter, ``M`` a name. Each worker is a
process, so that it has a row with its name. Times count from the begin of the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from unisono.report.events import PHASES, Evaluation, Event, SpeedSeen, StepDone
from unisono.report.marks import mark_of
from unisono.report.run_progress import RunProgress
from unisono.report.text import plain
from unisono.report.windows import WorkerStep, worker_steps

MARK = '{"displayTimeUnit":"ms","otherData":{"writer":"unisono report"'
MAX_SLICES = 300_000
RUN_PID = 1  # the row of what concerns all workers
_FIRST_WORKER_PID = 2
_STEP_TID = 1
_US = 1e6


def num_kept(num_steps: int, num_workers: int) -> int:
    """Return how many of the last steps fit in a trace that a browser can open."""
    return min(num_steps, max(MAX_SLICES // (max(num_workers, 1) * (len(PHASES) + 1)), 1))


def trace_parts(events: Iterable[Event], *, num_left_out: int) -> Iterator[str]:
    """Give a trace piece by piece.

    Args:
        events: what happened.
        num_left_out: how many steps to leave out at the begin.
    """
    yield f'{MARK},"steps_left_out":{num_left_out}}},"traceEvents":[\n'
    comma = ""
    for one in _trace_events(events, num_left_out):
        yield comma + json.dumps(one, allow_nan=False, separators=(",", ":"))
        comma = ",\n"
    yield "\n]}\n"


def _trace_events(events: Iterable[Event], num_left_out: int) -> Iterator[dict[str, Any]]:
    progress = RunProgress()
    named: set[int] = set()
    yield from _names(RUN_PID, "run", 0)
    for event in events:
        is_new = progress.add(event)
        if not math.isfinite(event.time_unix_s):
            continue  # it has no place
        zero = progress.began_unix_s
        if isinstance(event, SpeedSeen):
            continue  # nothing happened then
        if not isinstance(event, StepDone):
            yield from _instant(event, zero)
        elif is_new and progress.num_steps > num_left_out:
            for worker in worker_steps(event, progress.clock_at_unix_s):
                if (rank := worker.rank) not in named:
                    named.add(rank)
                    yield from _names(_FIRST_WORKER_PID + rank, f"worker {rank}", rank + 1)
                yield from _slices(event, worker, zero)
            yield from _counters(event, zero)


def _names(pid: int, name: str, place: int) -> Iterator[dict[str, Any]]:
    common = {"ph": "M", "pid": pid, "tid": _STEP_TID}
    yield {**common, "name": "process_name", "args": {"name": name}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": place}}
    yield {**common, "name": "thread_name", "args": {"name": "steps"}}


def _slices(step: StepDone, worker: WorkerStep, zero: float) -> Iterator[dict[str, Any]]:
    pid = _FIRST_WORKER_PID + worker.rank
    begins = [_us(begin - zero) for begin in worker.begins_unix_s]
    end = _us(worker.end_unix_s - zero)
    args = {"step": step.step, "epoch": step.epoch, "samples": step.num_samples}
    duration = max(end - begins[0], 0.0)
    yield _slice(pid, f"step {step.step}", "step", begins[0], duration) | {"args": args}
    for phase, begin, until in zip(PHASES, begins, [*begins[1:], end], strict=True):
        if until > begin:
            # Ends are the next one's begins, so that no slice sticks out of its step.
            yield _slice(pid, phase, "phase", begin, until - begin)


def _slice(pid: int, name: str, category: str, ts: float, duration: float) -> dict[str, Any]:
    row = {"ph": "X", "pid": pid, "tid": _STEP_TID, "name": name, "cat": category}
    return {**row, "ts": ts, "dur": round(duration, 3)}


def _counters(step: StepDone, zero: float) -> Iterator[dict[str, Any]]:
    common = {"ph": "C", "pid": RUN_PID, "ts": _us(step.time_unix_s - zero)}
    for name, value in step.means.items():
        if math.isfinite(value):
            yield {**common, "name": plain(name, 60), "args": {"value": value}}


def _instant(event: Event, zero: float) -> Iterator[dict[str, Any]]:
    args = {"args": {"step": event.step}}
    if isinstance(event, Evaluation) and event.seconds:
        begin = max(_us(event.time_unix_s - event.seconds - zero), 0.0)
        yield _slice(RUN_PID, "evaluation", "evaluation", begin, event.seconds * _US) | args
        return
    yield {
        "ph": "i",
        "s": "g",  # across all rows
        "pid": RUN_PID,
        "tid": _STEP_TID,
        "name": _word(event),
        "cat": type(event).__name__.lower(),
        "ts": _us(event.time_unix_s - zero),
        **args,
    }


def _word(event: Event) -> str:
    mark = mark_of(event)
    return type(event).__name__.lower() if mark is None else plain(mark.text, 200)


def _us(seconds: float) -> float:
    return round(seconds * _US, 3)
