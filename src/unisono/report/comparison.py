"""Several runs together: their curves, where they differ, and whether they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from unisono.report.curves import over_steps, validation_trace
from unisono.report.document import Page, document, legend_html, section
from unisono.report.events import End
from unisono.report.figure import SERIES_COLOURS, Figure, Key, series_colour
from unisono.report.history import History, identity
from unisono.report.page import script_name, state
from unisono.report.series import Series, smoothed
from unisono.report.text import amount, count, duration, in_page, in_plot, moment, name, value

MAX_RUNS = SERIES_COLOURS
_SMOOTH_PART = 60


def comparison(runs: Sequence[History]) -> str:
    """Return the page that draws several runs together."""
    page = Page()
    names = sorted({one for run in runs for one in (*run.means, *run.validation)})
    names.sort(key=lambda one: one != "loss")
    figures = [_metric(one, runs, is_wide=one == "loss" or len(names) == 1) for one in names]
    figures.append(_speed(runs))
    figures = [figure for figure in figures if figure.data]
    keys = [Key(name(run.name), series_colour(i), _group(i)) for i, run in enumerate(runs)]
    body = [
        f"<header><h1>{len(runs)} runs</h1><p>{in_page(digests_in_words(runs))}</p></header>",
        legend_html(keys, range(len(figures))),
        _summary(runs),
        section("Curves", page.place(figures) or "<p>No step has been finished yet.</p>"),
        section("What fixes the result", *_differences(runs)),
        f"<footer><p>Made by Unisono at {moment(datetime.now(UTC).timestamp())}. This "
        "page holds all that it shows and asks the network for nothing.</p></footer>",
    ]
    return document("Unisono: runs compared", body, page.figures)


def digests_in_words(runs: Sequence[History]) -> str:
    """Say whether the runs ended with the same bits."""
    ends = [run.course.ended for run in runs]
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


def _group(number: int) -> str:
    return f"run {number}"


def _metric(title: str, runs: Sequence[History], *, is_wide: bool) -> Figure:
    data: list[dict[str, Any]] = []
    has_both = False
    for i, run in enumerate(runs):
        if title in run.means:
            data.append(_line(run.means[title], run, i, _width(i, runs)))
        if title in run.validation:
            has_both = has_both or bool(data)
            trace = validation_trace(run.validation[title], f"{run.name}, validation", "")
            trace["line"] = {"color": series_colour(i), "width": _width(i, runs), "dash": "dot"}
            trace["marker"] = {"color": series_colour(i), "size": 7, "symbol": "diamond"}
            data.append({**trace, "legendgroup": _group(i)})
    note = "Where curves are equal, the first is seen beneath the others. "
    note += "Dotted, with diamonds: validation." if has_both else ""
    return Figure(name(title), note, data, over_steps(data), 340 if is_wide else 280, (), is_wide)


def _speed(runs: Sequence[History]) -> Figure:
    data = [
        _line(run.samples_per_second, run, i, _width(i, runs))
        for i, run in enumerate(runs)
        if run.samples_per_second.values
    ]
    return Figure("Samples per second", "", data, over_steps(data, from_zero=True), 280)


def _width(number: int, runs: Sequence[History]) -> float:
    """Make the first run's curve the widest, so that it is seen beneath an equal one."""
    return min(1.6 + 1.4 * (len(runs) - 1 - number), 7.2)


def _line(series: Series, run: History, number: int, width: float) -> dict[str, Any]:
    means = [one.mean for one in series.values]
    reach = len(means) // _SMOOTH_PART
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(means) <= 30 else "lines",
        "x": [one.middle_step for one in series.values],
        "y": smoothed(means, reach),
        "line": {"color": series_colour(number), "width": width},
        "marker": {"size": 5, "color": series_colour(number)},
        "hovertemplate": f"{in_plot(run.name)}, step %{{x:,.0f}}: %{{y:.5g}}<extra></extra>",
        "legendgroup": _group(number),
    }


def _summary(runs: Sequence[History]) -> str:
    heads = "".join(
        f"<th>{one}</th>"
        for one in ("", "State", "Steps", "Workers", "Samples a second", "Loss", "Time", "Digest")
    )
    rows = "".join(_summary_row(run, i) for i, run in enumerate(runs))
    return (
        f'<div class="scroll"><table style="min-width:760px"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _summary_row(run: History, number: int) -> str:
    speed = run.mean_samples_per_second
    loss = run.means.get("loss")
    digest = run.course.ended.digest if isinstance(run.course.ended, End) else None
    cells = [
        state(run.course)[0],
        count(run.course.num_done),
        count(len(run.course.ranks)),
        "–" if speed is None else count(speed),
        amount(loss.last if loss else None),
        duration(run.seconds),
    ]
    shown = "".join(f'<td class="number">{in_page(cell)}</td>' for cell in cells)
    colour = series_colour(number)
    return (
        f'<tr><th scope="row"><span class="run" style="background:{colour}"></span>'
        f"{in_page(name(run.name))}<br><small>{in_page(script_name(run))}</small></th>{shown}"
        f"<td><code>{in_page(digest[:16] if digest else '–')}</code></td></tr>"
    )


def _differences(runs: Sequence[History]) -> list[str]:
    facts = [identity(run) for run in runs]
    differing = different_facts(runs)
    same = [key for key in dict.fromkeys(k for one in facts for k in one) if key not in differing]
    parts = []
    if differing:
        parts.append("<p>Not the same in all runs:</p>" + _facts_table(runs, differing))
    else:
        parts.append("<p>All that the runs tell of themselves is the same.</p>")
    if same:
        shown = _facts_table(runs[:1], same)
        parts.append(f"<details><summary>The same in all runs</summary>{shown}</details>")
    return parts


def _facts_table(runs: Sequence[History], keys: Sequence[str]) -> str:
    facts = [identity(run) for run in runs]
    heads = "".join(f"<th>{in_page(name(run.name))}</th>" for run in runs)
    head = f"<thead><tr><th></th>{heads}</tr></thead>" if len(runs) > 1 else ""
    rows = "".join(
        f'<tr><th scope="row">{in_page(key)}</th>'
        + "".join(f"<td>{in_page(value(one[key]) if key in one else '–')}</td>" for one in facts)
        + "</tr>"
        for key in keys
    )
    width = f"min-width:{140 * (len(runs) + 1)}px"
    return f'<div class="scroll"><table style="{width}">{head}<tbody>{rows}</tbody></table></div>'
