"""Several runs together: their curves, where they differ, and whether they are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.quantities import amount, count, duration
from unisono.report.curves import (
    DIAMONDS,
    SERIES_COLOURS,
    Figure,
    Key,
    over_steps,
    series_colour,
    series_trace,
)
from unisono.report.document import rendered
from unisono.report.events import End
from unisono.report.history import History, identity
from unisono.report.page import state
from unisono.report.series import Series
from unisono.report.text import in_plot, name, value

MAX_RUNS = SERIES_COLOURS


@dataclass(frozen=True)
class ComparedRun:
    """One run in the table of all."""

    name: str
    colour: str
    numbers: Sequence[str]
    digest: str | None
    identity: Mapping[str, object]


def comparison(runs: Sequence[History]) -> str:
    """Return the page that draws several runs together."""
    facts = dict.fromkeys(key for run in runs for key in identity(run))
    different = different_facts(runs)
    return rendered(
        "runs.html",
        runs=[_row(run, number) for number, run in enumerate(runs)],
        digests_in_words=digests_in_words(runs),
        keys=[Key(name(run.name), series_colour(i), _group(i)) for i, run in enumerate(runs)],
        curves=[figure for figure in _figures(runs) if figure.data],
        different=different,
        same=[key for key in facts if key not in different],
    )


def digests_in_words(runs: Sequence[History]) -> str:
    """Say whether the runs ended with the same bits."""
    ends = [run.progress.ended for run in runs]
    digests = [end.digest if isinstance(end, End) else None for end in ends]
    if None in digests:
        missing = [name(run.name) for run, one in zip(runs, digests, strict=True) if one is None]
        return f"Whether they are equal cannot be told: no digest of {', '.join(missing)}."
    if len(set(digests)) == 1:
        return (
            "All digests are equal: the runs ended with the same parameters, buffers and "
            "optimizer state, bit for bit."
        )
    if len({end.step for end in ends if isinstance(end, End)}) > 1:
        return "The digests differ, as they must: the runs ended after different numbers of steps."
    if not different_facts(runs):
        return (
            "The digests differ, though all that the runs tell of themselves is the same: "
            "compare their code and data."
        )
    return "The digests differ; below is what fixes a result and is not the same."


def different_facts(runs: Sequence[History]) -> list[str]:
    """Name what fixes the result and is not the same in all runs."""
    facts = [identity(run) for run in runs]
    keys = dict.fromkeys(key for one in facts for key in one)
    return [key for key in keys if len({value(one.get(key)) for one in facts}) > 1]


def _row(run: History, number: int) -> ComparedRun:
    progress, loss = run.progress, run.means.get("loss")
    speed = run.mean_samples_per_second
    digest = progress.ended.digest if isinstance(progress.ended, End) else None
    numbers = [
        state(progress).word,
        count(progress.num_done),
        count(len(progress.ranks)),
        "–" if speed is None else count(speed),
        amount(loss.last if loss else None),
        duration(progress.seconds),
    ]
    colour, shown = series_colour(number), digest[:16] if digest else None
    return ComparedRun(name(run.name), colour, numbers, shown, identity(run))


def _figures(runs: Sequence[History]) -> list[Figure]:
    names = {one for run in runs for one in (*run.means, *run.validation)}
    metrics = sorted(names, key=lambda one: (one != "loss", one))
    figures = [_metric(one, runs, is_wide=one == "loss" or len(names) == 1) for one in metrics]
    speeds = [_line(run.samples_per_second, runs, i) for i, run in enumerate(runs)]
    data = [trace for trace in speeds if trace["x"]]
    return [*figures, Figure("Samples per second", "", data, over_steps(data, from_zero=True))]


def _metric(title: str, runs: Sequence[History], *, is_wide: bool) -> Figure:
    data: list[dict[str, Any]] = []
    has_both = False
    for i, run in enumerate(runs):
        if title in run.means:
            data.append(_line(run.means[title], runs, i))
        if title in run.validation:
            has_both = has_both or bool(data)
            line = {"color": series_colour(i), "width": _width(i, runs), "dash": "dot"}
            change = {**DIAMONDS, "line": line, "legendgroup": _group(i)}
            label = f"{run.name}, validation"
            data.append(series_trace(run.validation[title], label, "", **change))
    note = "Where curves are equal, the first is seen beneath the others. "
    note += "Dotted, with diamonds: validation." if has_both else ""
    return Figure(name(title), note, data, over_steps(data), 340 if is_wide else 280, (), is_wide)


def _line(series: Series, runs: Sequence[History], number: int) -> dict[str, Any]:
    label = runs[number].name
    return series_trace(
        series,
        label,
        series_colour(number),
        width=_width(number, runs),
        hovertemplate=f"{in_plot(label)}, step %{{x:,.0f}}: %{{y:.5g}}<extra></extra>",
        legendgroup=_group(number),
    )


def _width(number: int, runs: Sequence[History]) -> float:
    """Make the first run's curve the widest, so that it is seen beneath an equal one."""
    return min(1.6 + 1.4 * (len(runs) - 1 - number), 7.2)


def _group(number: int) -> str:
    return f"run {number}"
