"""Where the time goes: by phase over the run, and in each worker."""

from __future__ import annotations

from typing import Any

from unisono.quantities import plural
from unisono.report.curves import step_axis
from unisono.report.events import PHASES
from unisono.report.figure import Figure, Key
from unisono.report.history import History

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
    layout = {
        "xaxis": {"title": {"text": "ms a step"}},
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True},
        "barmode": "stack",
        "bargap": 0.25,
    }
    note = "A step's time in each worker, in the mean of the steps that it took part in."
    if history.phases.has_left_out:
        note += f" Only the first {plural(len(ranks), 'worker')} are drawn."
    height_px = 96 + 26 * max(len(ranks), 2)
    return Figure("By worker", note, data, layout, height_px, is_wide=True)


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
