"""Where the time goes: by phase over the run, in each worker, who waited when; and what each worker
did in a few steps, with a row each and time from left to right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from unisono.report.curves import over_steps, step_axis
from unisono.report.events import PHASES
from unisono.report.figure import Figure, Key, drawn_marks
from unisono.report.history import History
from unisono.report.phases import PhaseTimes
from unisono.report.text import count, plural
from unisono.report.windows import Kept, Window, WorkerStep, placed

_CUT = 4.0  # times the usual: a bar that is higher is cut, so that the others can be seen
_PALE = 0.3  # the least share that has the darkest colour

_MAX_BARS = 6000
_MAX_LABELS = 8
_EXPLAINED = (
    "A phase is drawn where it would lie if the phases came one after another; a worker with "
    "several shards goes through the first three several times. Blank: nothing of a step was done "
    "(evaluation, a checkpoint, a callback), or the worker was not there."
)

PHASE_KEYS = tuple(Key(phase, f"var(--{phase})", phase) for phase in (*PHASES, "between"))


def by_phase(history: History) -> Figure:
    """Return how long each phase of a step took, over the run."""
    stretches = history.phases.stretches
    width = history.phases.buckets.width
    rows = [one.per_step_s for one in stretches]
    data = [
        _bars(
            key,
            f"step %{{x:,.0f}}<br>{key.label}: %{{y:.3g}} ms",
            x=[one.first_step for one in stretches],
            y=[row[i] * 1e3 for row in rows],
            width=[max(one.last_step - one.first_step + 1, 1) for one in stretches],
            offset=0,
        )
        for i, key in enumerate(PHASE_KEYS)
    ]
    layout = over_steps(data, history.marks)
    layout["xaxis"] = step_axis(stretches[0].first_step, stretches[-1].last_step + 1)
    layout |= {"barmode": "stack", "bargap": 0, "yaxis": {"title": {"text": "ms"}}}
    note = "A step's time, in the mean of the workers"
    note += f" and of {width} steps a bar." if width > 1 else "."
    totals = [sum(row) * 1e3 for row in rows]
    usual = median(totals)
    if usual > 0 and max(totals) > _CUT * usual:
        layout["yaxis"]["range"] = [0, _CUT * usual]
        note += f" Bars above {_CUT * usual:.3g} ms are cut: double-click to see them whole."
    return Figure("Over the run", note, data, layout, 300, is_wide=True)


def by_worker(history: History) -> Figure:
    """Return how long each phase of a step took in each worker."""
    spent = history.phases.by_rank
    ranks = sorted(spent)
    data = [
        _bars(
            key,
            f"%{{y}}<br>{key.label}: %{{x:.3g}} ms a step",
            orientation="h",
            y=[f"worker {rank}" for rank in ranks],
            x=[spent[rank].phases_s[i] / spent[rank].num_steps * 1e3 for rank in ranks],
        )
        for i, key in enumerate(PHASE_KEYS[: len(PHASES)])
    ]
    layout = {"barmode": "stack", "bargap": 0.25, "xaxis": {"title": {"text": "ms a step"}}}
    note = "A step's time in each worker, in the mean of the steps that it took part in."
    layout |= {"yaxis": _worker_axis(ranks)}
    return Figure("By worker", note, data, layout, _height_px(96, len(ranks)), is_wide=True)


def waiting(history: History) -> Figure | None:
    """Return who waited when, over the whole run; None where there is nobody to wait for."""
    ranks, stretches = history.phases.ranks, history.phases.stretches
    if len(ranks) < 2:
        return None
    spent = [one.by_rank for one in stretches]
    shares = [  # blank where a worker was not there
        [one[rank].shares.get("waiting") if rank in one else None for one in spent]
        for rank in ranks
    ]
    greatest = max((share for row in shares for share in row if share is not None), default=0.0)
    edges = [one.first_step for one in stretches] + [stretches[-1].last_step + 1]
    data = {
        "type": "heatmap",
        "x": edges,
        "y": [f"worker {rank}" for rank in ranks],
        "z": shares,
        "zmin": 0,
        "zmax": max(greatest, _PALE),
        "ygap": 2,
        "colorscale": [[0, "var(--heat0)"], [0.5, "var(--heat1)"], [1, "var(--heat2)"]],
        "colorbar": {"thickness": 8, "tickformat": ".0%", "outlinewidth": 0, "len": 1},
        "hovertemplate": "%{y}, step %{x:,.0f}<br>waited %{z:.0%} of the time<extra></extra>",
        "hoverongaps": False,
    }
    layout = {
        "xaxis": step_axis(edges[0], edges[-1]),
        "yaxis": _worker_axis(ranks),
        **drawn_marks(history.marks, lambda mark: float(mark.step), edges[0], edges[-1]),
    }
    return Figure(
        "Who waited, over the whole run",
        "Strong colour: the worker waited for others. A row that stays pale while the others do "
        "not is the worker that they wait for. Blank: it was not there.",
        [data],
        layout,
        _height_px(96, len(ranks)),
        is_wide=True,
    )


def _bars(key: Key, hover: str, **rest: Any) -> dict[str, Any]:
    """Return a trace of bars, all of one phase.

    Args:
        key: the phase.
        hover: the text of a bar under the pointer, as plotly's template.
        rest: where the bars are, in plotly's words.
    """
    return {
        "type": "bar",
        "marker": {"color": key.colour, "line": {"width": 0}},
        "hovertemplate": f"{hover}<extra></extra>",
        "legendgroup": key.group,
        **rest,
    }


def _worker_axis(ranks: Sequence[int]) -> dict[str, Any]:
    """Return an axis with a row for each worker."""
    names = [f"worker {rank}" for rank in ranks]
    order = {"categoryorder": "array", "categoryarray": names}
    return {"autorange": "reversed", "type": "category", "automargin": True, **order}


def _height_px(around_px: int, num_rows: int) -> int:
    """Return the height of a figure with so many rows and so much around them."""
    return around_px + 26 * max(num_rows, 2)


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


def _fitting(kept: Iterable[Kept]) -> Window:
    """Place as many of the last steps as can be drawn."""
    window = placed(kept)
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
    data = [*_timeline_bars(workers, zero, per_s, unit), {**on_axis, "hoverinfo": "skip"}]
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
        "yaxis": _worker_axis(ranks),
        **drawn_marks(
            history.marks,
            lambda mark: (mark.time_unix_s - zero) * per_s,
            0,
            span,
            is_above=False,
        ),
    }
    height = _height_px(130, len(ranks))
    return Figure(title, note, data, layout, height, is_wide=True)


def _timeline_bars(
    workers: list[WorkerStep], zero: float, per_s: float, unit: str
) -> list[dict[str, Any]]:
    traces = []
    for i, key in enumerate(PHASE_KEYS[: len(PHASES)]):
        drawn = [worker for worker in workers if worker.phases_s[i] > 0]
        lengths = [worker.phases_s[i] * per_s for worker in drawn]
        traces.append(
            _bars(
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


def in_words(phases: PhaseTimes) -> str:
    """Say where the time of the steps went."""
    spent = phases.by_rank.values()
    totals = [sum(one.phases_s[i] for one in spent) for i in range(len(PHASES))]
    whole = sum(totals)
    if whole <= 0:
        return "Nothing was measured yet."
    parts = sorted(zip(totals, PHASES, strict=True), reverse=True)
    said = ", ".join(f"{phase} {seconds / whole:.0%}" for seconds, phase in parts if seconds > 0)
    return f"Of the workers' time in steps: {said.replace('%', ' %')}."


def left_out(phases: PhaseTimes) -> str:
    """Say what of the workers is not drawn, if anything."""
    if not phases.num_left_out:
        return ""
    return f"Only the first {plural(len(phases.ranks), 'worker')} are drawn."
