"""What `unisono report` and `unisono compare` do: read, draw, write.

Only pages are replaced, so a mistaken `-o train.py` does not overwrite the script.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.runtime.notices import amount, count, duration
from unisono.runtime.plainfile import path_given, written_whole
from unisono.tools.report.curves import (
    DIAMONDS,
    SERIES_COLOURS,
    Figure,
    over_steps,
    series_colour,
    series_trace,
)
from unisono.tools.report.history import History, Series, gather, identity
from unisono.tools.report.page import rendered, report, state
from unisono.tools.report.text import in_plot, name, value
from unisono.training.events.events import End

MAX_RUNS = SERIES_COLOURS


def write_report(
    directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of a run."""
    target = path_given(directory) / "report.html" if output is None else path_given(output)
    return write_page(target, report(gather(directory)))


def write_comparison(
    directories: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]
) -> Path:
    """Write a page that draws several runs together."""
    if not 2 <= len(directories) <= MAX_RUNS:
        raise ValueError(
            f"DIRECTORY must name 2 to {MAX_RUNS} runs, but names {len(directories)}: "
            "use for example `unisono compare runs/one runs/two`."
        )
    names = [Path(directory).resolve().name for directory in directories]
    if len(set(names)) < len(names):  # the last parts of the paths are not unique
        names = [str(Path(directory)) for directory in directories]
    runs = [gather(one, name) for one, name in zip(directories, names, strict=True)]
    return write_page(output, comparison(runs))


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write a page completely or not at all."""
    target = path_given(path).absolute()
    if target.suffix != ".html":
        raise ValueError(f"`-o` must name a page, but {str(path)!r} does not end in .html.")
    try:
        with written_whole(target) as file:
            file.write(page.encode(errors="replace"))
    except OSError as error:
        raise ValueError(
            f"`-o` must name a file that can be written, but {str(path)!r} cannot "
            f"({error.strerror}): make room, choose another folder, or change its permissions."
        ) from None
    return target


def comparison(runs: Sequence[History]) -> str:
    """Return the page that draws several runs together."""
    facts = dict.fromkeys(key for run in runs for key in identity(run))
    different = different_facts(runs)
    return rendered(
        "runs.html",
        runs=[_row(run, number) for number, run in enumerate(runs)],
        digests_in_words=digests_in_words(runs),
        curves=[figure for figure in _figures(runs) if figure.data],
        different=different,
        same=[key for key in facts if key not in different],
    )


def digests_in_words(runs: Sequence[History]) -> str:
    """Return whether the runs ended with the same bits, in words."""
    ends = [run.progress.ended for run in runs]
    digests = [end.digest if isinstance(end, End) else None for end in ends]
    if None in digests:
        missing = [name(run.name) for run, one in zip(runs, digests, strict=True) if one is None]
        return f"Whether they are equal is unknown: no digest of {', '.join(missing)}."
    if len(set(digests)) == 1:
        return (
            "All digests are equal: the runs ended with the same parameters, buffers and "
            "optimizer state, bit for bit."
        )
    if len({end.step for end in ends if isinstance(end, End)}) > 1:
        return "The digests differ, as they must: the runs ended after different numbers of steps."
    if not different_facts(runs):
        return (
            "The digests differ, although the recorded settings of the runs are the same: "
            "compare their code and data."
        )
    return "The digests differ; below are the settings that determine the result and differ."


def different_facts(runs: Sequence[History]) -> list[str]:
    """Return the names of settings that determine the result and differ between runs."""
    facts = [identity(run) for run in runs]
    keys = dict.fromkeys(key for one in facts for key in one)
    return [key for key in keys if len({value(one.get(key)) for one in facts}) > 1]


def _row(run: History, number: int) -> dict[str, Any]:
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
    return {
        "name": name(run.name),
        "colour": series_colour(number),
        "numbers": numbers,
        "digest": digest and digest[:16],
        "identity": identity(run),
    }


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
            is_first = title not in run.means
            change = {**DIAMONDS, "line": line, "legendgroup": run.name, "showlegend": is_first}
            label = f"{run.name}, validation"
            data.append(series_trace(run.validation[title], label, "", **change))
    note = "Dotted, with diamonds: validation." if has_both else ""
    return Figure(name(title), note, data, over_steps(data), 340 if is_wide else 280, is_wide)


def _line(series: Series, runs: Sequence[History], number: int) -> dict[str, Any]:
    label = runs[number].name
    return series_trace(
        series,
        label,
        series_colour(number),
        width=_width(number, runs),
        hovertemplate=f"{in_plot(label)}, step %{{x:,.0f}}: %{{y:.5g}}<extra></extra>",
        legendgroup=label,
    )


def _width(number: int, runs: Sequence[History]) -> float:
    """Return a curve's width: the first is the widest, so that an equal one does not hide it."""
    return min(1.6 + 1.4 * (len(runs) - 1 - number), 7.2)
