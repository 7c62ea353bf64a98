"""What each worker did in a few steps: a row each, time from left to right."""

from __future__ import annotations

from typing import Any

from unisono.report.curves import numbered
from unisono.report.events import PHASES
from unisono.report.figure import Figure, badges, drawn_badges
from unisono.report.history import History
from unisono.report.text import count
from unisono.report.times import PHASE_KEYS, ROW_PX
from unisono.report.windows import Window, phase_begins

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
    last = _fitting(windows.last)
    chosen = []
    slowest = _fitting(windows.slowest)
    loss = _fitting(windows.loss)
    if slowest and not _share(slowest, last) and not _share(slowest, loss):
        chosen.append((f"The slowest stretch: {_steps(slowest)}", slowest))
    if loss:
        chosen.append((f"When a worker was lost: {_steps(loss)}", loss))
    if last:
        chosen.append((f"The last steps: {_steps(last)}", last))
    return [
        _timeline(history, title, window, _EXPLAINED if i == 0 else "")
        for i, (title, window) in enumerate(chosen)
    ]


def _fitting(window: Window) -> Window:
    """Keep as many of the last steps as can be drawn."""
    if not window:
        return window
    num_workers = max(len(step.workers) for step in window)
    return window[-max(_MAX_BARS // (num_workers * len(PHASES)), 4) :]


def _share(one: Window, other: Window) -> bool:
    """Whether two windows show much of the same."""
    both = {step.step for step in one} & {step.step for step in other}
    return 2 * len(both) >= len(one)


def _steps(window: Window) -> str:
    first, last = window[0].step, window[-1].step
    return f"step {count(first)}" if first == last else f"steps {count(first)} to {count(last)}"


def _timeline(history: History, title: str, window: Window, note: str) -> Figure:
    begins = [min(worker.begun_unix_s for worker in step.workers) for step in window]
    zero = min(begins)
    end = max(
        worker.begun_unix_s + sum(worker.phases_s) for step in window for worker in step.workers
    )
    unit, per_s = ("s", 1.0) if end - zero >= 2 else ("ms", 1e3)
    ranks = sorted({worker.rank for step in window for worker in step.workers})
    placed = [
        ((mark.time_unix_s - zero) * per_s, number, mark)
        for number, mark in numbered(history.marks)
    ]
    span = (end - zero) * per_s
    data = [*_bars(window, zero, per_s, unit), _step_axis()]
    labelled = range(0, len(window), max(1, -(-len(window) // _MAX_LABELS)))
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "bargap": 0.18,
        "hovermode": "closest",
        "xaxis": {"title": {"text": unit}, "range": [0, span]},
        "xaxis2": {
            "overlaying": "x",
            "side": "top",
            "matches": "x",
            "showgrid": False,
            "tickvals": [(begins[i] - zero) * per_s for i in labelled],
            "ticktext": [f"{window[i].step}" for i in labelled],
            "title": {"text": "step", "standoff": 4},
        },
        "yaxis": {
            "autorange": "reversed",
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [f"worker {rank}" for rank in ranks],
            "automargin": True,
        },
        **drawn_badges(badges(placed, 0, span)),
    }
    height_px = 130 + ROW_PX * max(len(ranks), 2)
    return Figure(title, note, data, layout, height_px, is_wide=True, is_long=True)


def _bars(window: Window, zero: float, per_s: float, unit: str) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for i, key in enumerate(PHASE_KEYS[: len(PHASES)]):
        rows: list[str] = []
        lengths: list[float] = []
        bases: list[float] = []
        said: list[list[float]] = []
        for step in window:
            for worker in step.workers:
                if worker.phases_s[i] <= 0:
                    continue
                rows.append(f"worker {worker.rank}")
                lengths.append(worker.phases_s[i] * per_s)
                bases.append((phase_begins(worker)[i] - zero) * per_s)
                said.append([step.step, worker.phases_s[i] * per_s])
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": rows,
                "x": lengths,
                "base": bases,
                "customdata": said,
                "marker": {"color": key.colour, "line": {"width": 0}},
                "hovertemplate": "%{y}, step %{customdata[0]}<br>"
                f"{key.label}: %{{customdata[1]:.3g}} {unit}<extra></extra>",
                "legendgroup": key.group,
            }
        )
    return traces


def _step_axis() -> dict[str, Any]:
    """An axis is drawn only if something lies on it."""
    return {
        "type": "scatter",
        "x": [0],
        "y": [None],
        "xaxis": "x2",
        "mode": "lines",
        "hoverinfo": "skip",
    }
