"""Writes the event file: what happened in a run, one JSON object a line (`docs/events.md`).

The lines of steps ascend, and each step appears once, as it was done first: a step that is
repeated, because the run goes back, has the same results. Units are in the names; numbers that JSON
lacks are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, final

from typing_extensions import override

from unisono.errors import PeerLostError
from unisono.runtime.notices import text_of
from unisono.runtime.plainfile import check_plain, path_given
from unisono.runtime.procfs import thread_times
from unisono.runtime.signals import NOTICES
from unisono.training.callbacks.callback import Callback, DoneStep, Fit, Times
from unisono.training.callbacks.journal import Journal, say_alone
from unisono.training.callbacks.summary import Summary
from unisono.training.events.slowness import slowdowns_in

NAME = "events.jsonl"
FORMAT = 1

# The order of the lines of one step.
_FRACTIONS = {"step": 0.0, "evaluation": 0.25, "checkpoint": 0.5, "end": 0.75}

# How long to wait for times before writing a line without them. A worker that has not reported them
# is also late for the next step, so waiting costs no time unless the worker has died.
_TOLD_WITHIN_S = 2e-2
# For values that hardly change between steps but would be a third of a line.
_SELDOM_EVERY_S = 0.1

_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=str)


@final
class EventLog(Callback):
    """Writes the event file of a run; always present if the run has a directory.

    Args:
        path: the file; None: ``events.jsonl`` in the run directory.

    Workers report their times after a step, so its line is complete after the next step, or at once
    with one worker. It is written within a tenth of a second of training, and before the next
    snapshot.
    """

    may_fail = True

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = None if path is None else path_given(path).absolute()
        self._journal: Journal | None = None
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._ended_at_s = 0.0
        self._seldom_due_s = 0.0
        self._begun_at = 0

    @override
    def writes_to(self, directory: Path | None) -> Path | None:
        return self._given or (directory and directory / NAME)

    def on_begin(self, fit: Fit) -> None:
        """Continue the file if the run continues, otherwise begin it."""
        path = self.writes_to(fit.directory)
        if path is None:
            return
        if not fit.has_joined:
            check_plain(path)

        journal = Journal(
            path, place_of, fit, anew=lambda place: _start(fit, math.ceil(min(place, fit.step)))
        )

        def begin() -> str:
            try:
                if not fit.has_joined:
                    journal.begin(fit.step)
                if not (fit.has_joined and path.exists()):
                    journal.note(_start(fit, fit.step))
            except Exception as error:  # the others wait for this result
                return f"{type(error).__name__}: {error}"
            return ""

        trouble = ""
        if not fit.has_joined:
            # The file may be another run's: no worker may write a failure there before this.
            trouble = fit.once(begin, "beginning the event file")
        elif fit.is_leader:
            trouble = begin()
        if trouble:
            raise RuntimeError(trouble)
        self._journal, self._pending = journal, None
        self._ended_at_s = perf_counter()
        self._seldom_due_s, self._begun_at = 0.0, fit.step

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Add the line of the step before this one, and remember the facts of this one."""
        if self._journal is None:
            return
        self._add_pending(fit)
        ranks, now_s = fit.ranks, perf_counter()
        seconds, self._ended_at_s = now_s - self._ended_at_s, now_s
        facts = {
            "time_unix_s": time.time(),
            "step": step.number,
            "epoch": step.epoch,
            "num_samples": step.num_samples,
            "seconds": round(seconds, 6),
            "means": dict(step.means),
            "learning_rates": [float(g["lr"]) for g in fit.optimizer.param_groups if "lr" in g],
            "gradient_norm": step.gradient_norm,
            "ranks": ranks,
        }
        if now_s >= self._seldom_due_s:
            self._seldom_due_s = now_s + _SELDOM_EVERY_S
            facts["has_more"] = True
        self._pending = step.number, facts
        if len(ranks) == 1:
            self._add_pending(fit)  # no other worker reports times

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Write the result of a validation."""
        facts = {"step": fit.step, "epoch": fit.epoch, "seconds": seconds, "means": dict(means)}
        self._add(fit, "evaluation", fit.step, facts)

    def on_checkpoint(self, fit: Fit, step: int) -> None:
        """Write that a checkpoint was requested."""
        self._add(fit, "checkpoint", step, {"step": step})

    def on_snapshot(self, fit: Fit) -> None:
        """Write all lines: if all workers are lost, the run continues from here."""
        if self._journal is None or not fit.is_leader:
            return
        if self._pending is not None:
            # All workers have done the step and are about to report their times.
            until_s = perf_counter() + _TOLD_WITHIN_S
            while None in _times(fit, *self._pending) and perf_counter() < until_s:
                os.sched_yield()
        self._write_pending(fit)

    def on_workers_changed(self, fit: Fit, before: Sequence[int], why: str) -> None:
        """Write which workers compute now."""
        lost = [rank for rank in before if rank not in fit.ranks]
        if not before:
            lost = list(range(fit.facts["world_size"]))
        joined = [rank for rank in fit.ranks if rank not in before]
        if joined:
            # All have synchronized since the newest step, of which new workers know nothing.
            self._write_pending(fit)
        if self._journal is not None and fit.is_leader:
            facts = {"lost": lost, "joined": joined, "why": why.split("; ") if why else []}
            self._journal.note(encode("workers", step=fit.step, **_workers(fit), **facts))

    def on_went_back(self, fit: Fit, from_step: int) -> None:
        """Write that steps will be repeated; those that were done have their lines."""
        self._write_pending(fit)
        if self._journal is not None and fit.is_leader:
            self._journal.note(encode("went_back", step=fit.step, from_step=from_step))

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """Write how the call ended."""
        facts: dict[str, Any] = {
            "step": fit.step,
            "seconds": summary.seconds,
            "samples_per_second": summary.samples_per_second,
            "digest": summary.digest,
            "stopped_early": fit.step < fit.end_step,
        }
        self._add(fit, "end", fit.step, facts)
        self._close()
        if fit.is_leader and (path := self.writes_to(fit.directory)) is not None:
            with suppress(OSError):  # the journal has reported it
                for one in slowdowns_in(path, {**fit.facts, "step": self._begun_at}) or ():
                    say_alone(fit, one.line)

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """Write what happened, on the worker that failed and not on those that wait for it."""
        if self._journal is not None:
            has_a_say = self._writes_end(fit, error)
            self._write_pending(fit)
            if has_a_say and (by := _signal_of(error)):
                self._journal.note(encode("interrupted", step=fit.step, by=by))
            elif has_a_say:
                facts = {"error": type(error).__name__, "message": text_of(error)[:10_000]}
                self._journal.note(encode("failure", step=fit.step, rank=fit.rank, **facts))
        self._close()

    def _writes_end(self, fit: Fit, error: BaseException) -> bool:
        """Return whether this worker writes how the call ends."""
        if isinstance(error, PeerLostError):
            # A killed worker writes nothing: the first of the others writes for it.
            note = b"" if self._journal is None else self._journal.last_note()
            is_told = b'"event":"failure"' in note
            return not is_told and fit.rank == min(set(fit.ranks) - {error.rank}, default=None)
        return fit.is_leader or not _signal_of(error)

    def _add(self, fit: Fit, event: str, steps_done: int, facts: dict[str, Any]) -> None:
        if self._journal is None:
            return
        self._write_pending(fit)
        facts = {"time_unix_s": time.time(), **facts}
        place = steps_done - 1 + _FRACTIONS[event]
        self._journal.add(place, lambda: encode(event, **facts))

    def _write_pending(self, fit: Fit) -> None:
        """Write everything known so far."""
        self._add_pending(fit)
        if self._journal is not None:
            self._journal.flush()

    def _add_pending(self, fit: Fit) -> None:
        """Add the line of the newest step, whose times are now known."""
        if self._pending is None or self._journal is None:
            return
        (number, facts), self._pending = self._pending, None
        # Now: a worker that adds the line for a lost one may come too late for the times.
        more = _more(fit, facts["ranks"]) if facts.pop("has_more", False) else {}
        make = functools.partial(step_line, facts, _times(fit, number, facts), **more)
        self._journal.add(number, make, may_wait=True)

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal = None


def _times(fit: Fit, number: int, facts: Mapping[str, Any]) -> list[Times | None]:
    """Return the times that each worker has reported; None for one that has not."""
    return [fit.times(rank, number) for rank in facts["ranks"]]


def _more(fit: Fit, ranks: Sequence[int]) -> dict[str, list[Any]]:
    """Return what only some lines contain: each worker's device memory, and its wait for a core."""

    def delayed_s(pid: int | None) -> float | None:
        times = None if pid is None else thread_times(Path(f"/proc/{pid}"))
        return round(times.waited_ns * 1e-9, 3) if times is not None and times.ran_ns else None

    columns: dict[str, list[Any]] = {
        "allocated_bytes": [fit.memory(rank) for rank in ranks],
        "delayed_s": [delayed_s(fit.pid(rank)) for rank in ranks] if fit.is_leader else [],
    }
    return {name: told for name, told in columns.items() if any(one is not None for one in told)}


def _signal_of(error: BaseException) -> str:
    """Return the name of the signal that ends the program; empty if it ends by itself."""
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT"
    status = error.code if isinstance(error, SystemExit) else None
    return next((notice.name for notice in NOTICES if status == 128 + notice), "")


def encode(event: str, **facts: Any) -> bytes:
    """Return one line of the file."""
    line = {"event": event, "time_unix_s": time.time(), **facts}
    try:
        text = _JSON.encode(line)
    except ValueError:  # rare: a line with NaN
        text = _JSON.encode(_in_words(line))
    return text.encode() + b"\n"


def step_line(
    facts: Mapping[str, Any], rows: Sequence[Times | None], **more: Sequence[Any]
) -> bytes:
    """Return the line of a step: its facts, each worker's times by phase, and `more`."""
    # Formatted by hand, as it is written after each step: the encoder takes three times longer.
    columns = [
        f'"{name}":[{",".join([f"{row[at]:.6f}" if row is not None else "null" for row in rows])}]'
        for at, name in enumerate(Times._fields)
    ]
    columns += [f'"{name}":{_JSON.encode(column)}' for name, column in more.items()]
    return encode("step", **facts)[:-2] + f",{','.join(columns)}}}\n".encode()


def place_of(line: bytes) -> float | None:
    """Return where a line belongs, for :class:`Journal`; None if it belongs to no step."""
    try:
        facts = json.loads(line)
        event, step = facts["event"], int(facts["step"])
        return float(step - (event != "step") + _FRACTIONS[event])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _in_words(value: Any) -> Any:
    """Replace numbers that JSON lacks by strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _in_words(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_words(item) for item in value]
    return value


def _start(fit: Fit, step: int) -> bytes:
    place = {"step": step, "epoch": fit.epoch, "end_step": fit.end_step}
    return encode("start", format=FORMAT, **place, **_workers(fit), **fit.facts)


def _workers(fit: Fit) -> dict[str, Any]:
    return {"ranks": fit.ranks, "pids": [fit.pid(rank) for rank in fit.ranks]}
