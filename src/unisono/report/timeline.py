"""What each worker did in a few steps: a row each, time from left to right."""

from __future__ import annotations

from typing import Any

from unisono.report.events import PHASES
from unisono.report.figure import Figure, drawn_marks
from unisono.report.history import History
from unisono.report.text import count
from unisono.report.times import PHASE_KEYS, bars, height_px, worker_axis
from unisono.report.windows import Window, WorkerStep

_MAX_BARS = 6000
_MAX_LABELS = 8
_EXPLAINED = (
    "A phase is drawn where it would lie if the phases came one after another; a worker with "
    "several shards goes through the first three several times. Blank: nothing of a step was done "
    "(evaluation, a checkpoint, a callback), or the worker was not there."
)


def timelines(history: History) -> list[Figure]:
    """Return the timelines that say most: the slowest stretch, a recovery, the last steps."""
    windows = history.windows
    slowest, loss, last = map(_fitting, (windows.slowest, windows.loss, windows.last))
    if _is_much_of(slowest, last) or _is_much_of(slowest, loss):
        slowest = ()
    titles = ("The slowest stretch", "When a worker was lost", "The last steps")
    chosen = [pair for pair in zip(titles, (slowest, loss, last), strict=True) if pair[1]]
    return [
        _timeline(history, f"{title}: {_steps(window)}", window, _EXPLAINED if i == 0 else "")
        for i, (title, window) in enumerate(chosen)
    ]


def _fitting(window: Window) -> Window:
    """Keep as many of the last steps as can be drawn."""
    num_workers = max(map(len, window), default=1)
    return window[-max(_MAX_BARS // (num_workers * len(PHASES)), 4) :]


def _is_much_of(one: Window, other: Window) -> bool:
    """Whether another window shows at least half of the same steps."""
    both = {step[0].step for step in one} & {step[0].step for step in other}
    return 2 * len(both) >= len(one)


def _steps(window: Window) -> str:
    first, last = window[0][0].step, window[-1][0].step
    return f"step {count(first)}" if first == last else f"steps {count(first)} to {count(last)}"


def _timeline(history: History, title: str, window: Window, note: str) -> Figure:
    workers = [worker for step in window for worker in step]
    begins = [min(worker.begun_unix_s for worker in step) for step in window]
    zero, end = min(begins), max(worker.end_unix_s for worker in workers)
    unit, per_s = ("s", 1.0) if end - zero >= 2 else ("ms", 1e3)
    ranks = sorted({worker.rank for worker in workers})
    span = (end - zero) * per_s
    labelled = range(0, len(window), max(1, -(-len(window) // _MAX_LABELS)))
    # An axis is drawn only if something lies on it.
    on_axis = {"type": "scatter", "x": [0], "y": [None], "xaxis": "x2", "mode": "lines"}
    data = [*_bars(workers, zero, per_s, unit), {**on_axis, "hoverinfo": "skip"}]
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "bargap": 0.18,
        "xaxis": {"title": {"text": unit}, "range": [0, span]},
        "xaxis2": {
            "overlaying": "x",
            "side": "top",
            "matches": "x",
            "showgrid": False,
            "tickvals": [(begins[i] - zero) * per_s for i in labelled],
            "ticktext": [f"{window[i][0].step}" for i in labelled],
            "title": {"text": "step", "standoff": 4},
        },
        "yaxis": worker_axis(ranks),
        **drawn_marks(
            history.marks,
            lambda mark: (mark.time_unix_s - zero) * per_s,
            0,
            span,
            is_above=False,
        ),
    }
    height = height_px(130, len(ranks))
    return Figure(title, note, data, layout, height, is_wide=True, is_long=True)


def _bars(workers: list[WorkerStep], zero: float, per_s: float, unit: str) -> list[dict[str, Any]]:
    traces = []
    for i, key in enumerate(PHASE_KEYS[: len(PHASES)]):
        drawn = [worker for worker in workers if worker.phases_s[i] > 0]
        lengths = [worker.phases_s[i] * per_s for worker in drawn]
        traces.append(
            bars(
                key,
                f"%{{y}}, step %{{customdata[0]}}<br>{key.label}: %{{customdata[1]:.3g}} {unit}",
                orientation="h",
                y=[f"worker {worker.rank}" for worker in drawn],
                x=lengths,
                base=[(worker.begins_unix_s[i] - zero) * per_s for worker in drawn],
                customdata=[[w.step, length] for w, length in zip(drawn, lengths, strict=True)],
            )
        )
    return traces
