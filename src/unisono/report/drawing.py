"""Lay out the live view of a run on a terminal.

Lines break between parts, never within one, unless a part alone is wider than the terminal. What is
less important goes first where there is little room: columns from the table, lines from above it,
then workers of whom there is nothing to tell. ::

    title · facts                      ┐
    step ━━━━━━━━━━──── position       │ as many lines as there is room for
    numbers · numbers                  │
    what was kept · trouble · message  ┘
    worker  step  time goes to …       one line a worker
    what the letters mean
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from unisono.report.events import PHASES
from unisono.report.table import STYLES, table, worth_telling
from unisono.report.view import Condition, View

_MIN_BAR = 10
_MIN_ROWS = 3
_MAX_MESSAGE_ROWS = 3
_BETWEEN = " · "
_CONDITIONS = {
    Condition.RUNNING: "green",
    Condition.STILL: "yellow",
    Condition.FAILED: "bold red",
    Condition.GONE: "bold red",
}


def draw(view: View, width: int, height: int | None = None, *, has_unicode: bool = True) -> Group:
    """Draw a view.

    Args:
        view: what to draw.
        width: of the terminal, in cells.
        height: of the terminal; None: as much as it takes, and the message is not cut.
        has_unicode: whether the terminal can show more than ASCII.

    Returns:
        What takes at most ``width`` cells and ``height`` lines; without a ``height`` the message
        takes as many as it is long.
    """
    width = max(width, 1)
    above = _above(view, width, has_unicode=has_unicode, cuts=height is not None)
    below = _below(view, width)
    shown = view.workers
    num_rows = len(shown)
    if height is not None:
        # A few workers are worth more than most of what is above them.
        above = _most_important(above, max(height - min(num_rows, _MIN_ROWS) - 1, 1))
        room = max(height - len(above) - 1, 0)
        num_rows, below = min(num_rows, room), below[: max(room - num_rows, 0)]
    if num_rows < len(shown):
        shown = worth_telling(shown, num_rows - 1)
    found: list[RenderableType] = [line for _, line in above]
    if num_rows:
        found.append(table(view.workers, shown, width))
        if more := len(view.workers) - len(shown):
            found.append(_line(f"and {more:,} more workers", "dim"))
    return Group(*found, *below)


def _line(words: str, style: str = "") -> Text:
    return Text(words, style, no_wrap=True, overflow="ellipsis")


def _above(view: View, width: int, *, has_unicode: bool, cuts: bool) -> list[tuple[int, Text]]:
    """Give lines in order, each with how important it is: the least number stays longest."""
    style = _CONDITIONS.get(view.condition, "")
    title = [_line(view.title, "bold")] if view.title else []
    facts = list(map(_line, view.facts))
    if facts:
        facts[0].stylize(style)
    trouble = [_line(view.trouble, "yellow")] if view.trouble else []
    message = [Text(view.message, style)] if view.message else []
    if cuts:
        wrap = textwrap.TextWrapper(width, max_lines=_MAX_MESSAGE_ROWS, placeholder="…")
        wrap.break_on_hyphens = False
        message = [_line(words, style) for words in wrap.wrap(view.message)]
    # Of each group: how important its first line is, and how important the others.
    groups = [
        (2, 8, _flow([*title, *facts], width)),
        (1, 7, _progress(view, width, has_unicode)),
        (3, 9, _flow(map(_line, view.numbers), width)),
        (5, 11, _flow(map(_line, view.kept), width)),
        (4, 10, trouble),
        (0, 2, message),
    ]
    return [
        (first if row == 0 else others, line)
        for first, others, lines in groups
        for row, line in enumerate(lines)
    ]


def _most_important(lines: list[tuple[int, Text]], num_lines: int) -> list[tuple[int, Text]]:
    order = sorted(range(len(lines)), key=lambda i: lines[i][0])
    return [lines[i] for i in sorted(order[:num_lines])]


def _flow(parts: Iterable[Text], width: int) -> list[Text]:
    """Put parts one behind another, on as many lines as it takes."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(_BETWEEN) + part.cell_len <= width:
            lines[-1].append(_BETWEEN, "dim").append_text(part)
        else:
            lines.append(part)
    return lines


def _progress(view: View, width: int, has_unicode: bool) -> list[Text]:
    if view.condition is Condition.AWAITED:
        return []
    of = f" of {view.end_step:,}" if view.end_step else ""
    parts = [_line(f"step {view.num_done:,}{of}"), *map(_line, view.position)]
    first, *others = _flow(parts, width)
    if not view.end_step:
        return [first, *others]
    share = min(view.num_done / view.end_step, 1.0)
    percent = f" {int(share * 100)} %"
    room = width - first.cell_len - len(percent) - 2
    if room >= _MIN_BAR:
        num_cells = min(room, 40)
        num_full = int(share * num_cells)
        full, empty = ("━", "─") if has_unicode else ("=", "-")
        first.append("  ").append(full * num_full, "green")
        first.append(empty * (num_cells - num_full), "dim").append(percent)
    return [first, *others]


def _below(view: View, width: int) -> list[Text]:
    """Say what slows the steps, and what the letters mean."""
    lines = []
    if view.slowness:
        fitting = (words for words in view.slowness if len(words) + 2 <= width)
        lines.append(_line(f"! {next(fitting, view.slowness[-1])}", "yellow"))
    steps = "of the last step" if view.num_steps == 1 else f"of the last {view.num_steps:,} steps"
    names = [Text(phase, style) for phase, style in zip(PHASES, STYLES, strict=True)]
    legend = Text("  ").join([*names, Text(steps, "dim")])
    if any(worker.shares for worker in view.workers) and legend.cell_len <= width:
        lines.append(legend)
    return lines
