"""Where the time goes: by phase over the run, and in each worker."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from unisono.quantities import plural
from unisono.report.curves import step_axis
from unisono.report.events import PHASES
from unisono.report.figure import Figure, Key
from unisono.report.history import History

_CUT = 4.0  # times the usual: a bar that is higher is cut, so that the others can be seen

PHASE_KEYS = tuple(Key(phase, f"var(--{phase})", phase) for phase in (*PHASES, "between"))


def by_phase(history: History) -> Figure:
    """Return how long each phase of a step took, over the run."""
    phases = history.phases.over_steps
    stretches, width = phases["between"].values, phases["between"].width
    data = [
        _bars(
            key,
            f"step %{{x:,.0f}}<br>{key.label}: %{{y:.3g}} ms",
            x=[one.first_step for one in stretches],
            y=[(one.mean or 0.0) * 1e3 for one in phases[key.label].values],
            width=[max(one.last_step - one.first_step + 1, 1) for one in stretches],
            offset=0,
        )
        for key in PHASE_KEYS
    ]
    layout: dict[str, Any] = {
        "xaxis": step_axis(stretches[0].first_step, stretches[-1].last_step + 1),
        "yaxis": {"title": {"text": "ms"}},
        "barmode": "stack",
        "bargap": 0,
    }
    note = "A step's time, in the mean of the workers"
    note += f" and of {width} steps a bar." if width > 1 else "."
    totals = [sum(bars) for bars in zip(*[trace["y"] for trace in data], strict=True)]
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
    if history.phases.has_left_out:
        note += f" Only the first {plural(len(ranks), 'worker')} are drawn."
    layout |= {"yaxis": _worker_axis(ranks)}
    return Figure("By worker", note, data, layout, _height_px(96, len(ranks)), is_wide=True)


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
