"""Where the time goes: by phase over the run, by phase in each worker, and who waited when."""

from __future__ import annotations

from statistics import median
from typing import Any

from unisono.report.curves import numbered, over_steps, step_axis
from unisono.report.events import PHASES
from unisono.report.figure import Figure, Key, badges, drawn_badges
from unisono.report.history import History
from unisono.report.phases import PhaseTimes, slowest
from unisono.report.text import plural

BETWEEN = "between"
ROW_PX = 26
_CUT = 4.0  # times the usual: a bar that is higher is cut, so that the others can be seen
_FAIR = 1.15  # whoever computes no longer than so many times the others is not slow
_PALE = 0.3  # the least share that has the darkest colour

PHASE_KEYS = tuple(Key(phase, f"var(--{phase})", phase) for phase in (*PHASES, BETWEEN))


def by_phase(history: History) -> Figure:
    """Return how long each phase of a step took, over the run."""
    stretches = history.phases.stretches
    width = history.phases.buckets.width
    rows = [one.per_step_s for one in stretches]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "x": [one.first_step for one in stretches],
            "y": [row[i] * 1e3 for row in rows],
            "width": [max(one.last_step - one.first_step + 1, 1) for one in stretches],
            "offset": 0,
            "marker": {"color": key.colour, "line": {"width": 0}},
            "hovertemplate": f"step %{{x:,.0f}}<br>{key.label}: %{{y:.3g}} ms<extra></extra>",
            "legendgroup": key.group,
        }
        for i, key in enumerate(PHASE_KEYS)
    ]
    layout = over_steps(data, numbered(history.marks))
    last = stretches[-1].last_step + 1
    layout["xaxis"] = step_axis(stretches[0].first_step, last)
    layout |= {"barmode": "stack", "bargap": 0}
    layout["yaxis"] = {"title": {"text": "ms"}}
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
    phases = history.phases
    spent = phases.by_rank
    ranks = sorted(spent)
    names = [f"worker {rank}" for rank in ranks]
    data: list[dict[str, Any]] = []
    for i, key in enumerate(PHASE_KEYS[: len(PHASES)]):
        per_step = [spent[rank].phases_s[i] / spent[rank].num_steps * 1e3 for rank in ranks]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": names,
                "x": per_step,
                "marker": {"color": key.colour, "line": {"width": 0}},
                "hovertemplate": f"%{{y}}<br>{key.label}: %{{x:.3g}} ms a step<extra></extra>",
                "legendgroup": key.group,
            }
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "xaxis": {"title": {"text": "ms a step"}},
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True},
        "hovermode": "closest",
    }
    return Figure(
        "By worker",
        "A step's time in each worker, in the mean of the steps that it took part in.",
        data,
        layout,
        _height(len(names)),
        is_wide=True,
    )


def waiting(history: History) -> Figure | None:
    """Return who waited when, over the whole run; None where there is nobody to wait for."""
    phases = history.phases
    ranks = phases.ranks
    if len(ranks) < 2:
        return None
    stretches = phases.stretches
    spent = [one.by_rank for one in stretches]
    shares = [
        [one[rank].waiting_share if rank in one else None for one in spent]  # blank: not there
        for rank in ranks
    ]
    greatest = max((share for row in shares for share in row if share is not None), default=0.0)
    edges = [one.first_step for one in stretches] + [stretches[-1].last_step + 1]
    placed = [(float(mark.step), number, mark) for number, mark in numbered(history.marks)]
    data = [
        {
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
    ]
    layout = {
        "xaxis": step_axis(edges[0], edges[-1]),
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True},
        "hovermode": "closest",
        **drawn_badges(badges(placed, edges[0], edges[-1]), is_above=True),
    }
    return Figure(
        "Who waited, over the whole run",
        "Strong colour: the worker waited for others. A row that stays pale while the others do "
        "not is the worker that they wait for. Blank: it was not there.",
        data,
        layout,
        _height(len(ranks)),
        is_wide=True,
    )


def in_words(phases: PhaseTimes) -> str:
    """Say where the time went, and whether one worker was slow."""
    if not phases.by_rank:
        return "Nothing was measured yet."
    totals = [sum(one.phases_s[i] for one in phases.by_rank.values()) for i in range(len(PHASES))]
    whole = sum(totals)
    if whole <= 0:
        return "Nothing was measured yet."
    parts = sorted(zip(totals, PHASES, strict=True), reverse=True)
    said = ", ".join(f"{phase} {seconds / whole:.0%}" for seconds, phase in parts if seconds > 0)
    words = f"Of the workers' time in steps: {said}."
    if (found := slowest(phases.together)) is None:
        return words
    rank, times = found
    if times < _FAIR:
        return f"{words} No worker was slow: the longest computed {times - 1:.0%} more than usual."
    return (
        f"{words} Worker {rank} was the slowest: it computed {times - 1:.0%} longer a step than "
        "the others, who waited for it. It may have more shards than they, or a busier core."
    )


def left_out(phases: PhaseTimes) -> str:
    """Say what of the workers is not drawn, if anything."""
    if not phases.num_left_out:
        return ""
    shown = plural(len(phases.by_rank), "worker")
    return f"Only the first {shown} are drawn."


def _height(num_rows: int) -> int:
    return 96 + max(ROW_PX * num_rows, 52)
