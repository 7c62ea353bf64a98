"""Where on a terminal is what is to be seen of a run?

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

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from unisono.report.events import PHASES
from unisono.report.table import STYLES, Lines, cut, table
from unisono.report.view import Condition, View

_MIN_BAR = 10
_MIN_ROWS = 3
_MAX_MESSAGE_ROWS = 3
_BETWEEN = " · "
_MESSAGE, _PROGRESS, _TITLE, _NUMBERS, _TROUBLE, _KEPT = range(6)  # what stays longest first
_CONDITIONS = {
    Condition.RUNNING: "green",
    Condition.STILL: "yellow",
    Condition.FAILED: "bold red",
    Condition.GONE: "bold red",
}


def draw(view: View, width: int, height: int | None = None, *, has_unicode: bool = True) -> Text:
    """Draw what is to be seen.

    Args:
        view: that.
        width: of the terminal, in cells.
        height: of the terminal; None: as much as it takes, and the message is not cut.
        has_unicode: whether the terminal can show more than ASCII.

    Returns:
        Lines of at most ``width`` cells, at most ``height`` of them; without a ``height`` the
        message is one line, however long.
    """
    width = max(width, 1)
    above = _above(view, width, has_unicode=has_unicode, cuts=height is not None)
    below = _below(view, width)
    num_rows = len(view.workers)
    if height is not None:
        room = max(height, 1)
        # A few workers are worth more than most of what is above them.
        above = _most_important(above, max(room - min(num_rows, _MIN_ROWS) - 1, 1))
        num_rows = min(num_rows, max(room - len(above) - 1, 0))
        below = below[: max(room - len(above) - 1 - num_rows, 0)]
    lines = [line.text for line in above] + table(view.workers, width, num_rows) + below
    return Text("\n").join(lines)


@dataclass(frozen=True)
class _Placed:
    """A line above the table."""

    text: Text
    importance: tuple[bool, int]  # the least stays longest


def _above(view: View, width: int, *, has_unicode: bool, cuts: bool) -> list[_Placed]:
    condition = _CONDITIONS.get(view.condition, "")
    title = [Text(view.title, "bold")] if view.title else []
    facts = [Text(fact) for fact in view.facts]
    if facts:
        facts[0].stylize(condition)
    message = Text(view.message, condition)
    groups = [
        (_TITLE, _flow([*title, *facts], width)),
        (_PROGRESS, _progress(view, width, has_unicode)),
        (_NUMBERS, _flow([Text(number) for number in view.numbers], width)),
        (_KEPT, _flow([Text(kept) for kept in view.kept], width)),
        (_TROUBLE, _flow([Text(view.trouble, "yellow")] if view.trouble else [], width)),
        (_MESSAGE, _wrapped(message, width) if cuts else [message] if view.message else []),
    ]
    return [
        _Placed(line, _importance(group, row))
        for group, lines in groups
        for row, line in enumerate(lines)
    ]


def _importance(group: int, row: int) -> tuple[bool, int]:
    """First lines of groups come before others; a message is worth more than the numbers."""
    return (False, _TITLE) if group == _MESSAGE and row else (row > 0, group)


def _most_important(lines: list[_Placed], num_lines: int) -> list[_Placed]:
    order = sorted(range(len(lines)), key=lambda i: lines[i].importance)
    return [lines[i] for i in sorted(order[:num_lines])]


def _flow(parts: Sequence[Text], width: int) -> Lines:
    """Put parts one behind another, on as many lines as it takes."""
    lines: Lines = []
    for part in parts:
        if lines and lines[-1].cell_len + len(_BETWEEN) + part.cell_len <= width:
            lines[-1].append(_BETWEEN, "dim").append_text(part)
        else:
            lines.append(part.copy())
    return [cut(line, width) for line in lines]


def _wrapped(words: Text, width: int) -> Lines:
    """Break lines between words; only so many of them."""
    lines: Lines = []
    while words and len(lines) < _MAX_MESSAGE_ROWS - 1 and words.cell_len > width:
        at = words.plain.rfind(" ", 0, width + 1)
        if at < 1:
            break
        lines.append(cut(words[:at], width))
        words = words[at + 1 :]
    return [*lines, cut(words, width)] if words else lines


def _progress(view: View, width: int, has_unicode: bool) -> Lines:
    if view.condition is Condition.AWAITED:
        return []
    if not view.end_step:
        return _flow([Text(f"step {view.num_done:,}"), *map(Text, view.position)], width)
    share = min(view.num_done / view.end_step, 1.0)
    parts = [Text(f"step {view.num_done:,} of {view.end_step:,}"), *map(Text, view.position)]
    first, *others = _flow(parts, width)
    percent = f" {int(share * 100)} %"
    room = width - first.cell_len - len(percent) - 2
    if room >= _MIN_BAR:
        num_cells = min(room, 40)
        num_full = int(share * num_cells)
        full, empty = ("━", "─") if has_unicode else ("=", "-")
        first = first.copy().append("  ")
        first.append(full * num_full, "green").append(empty * (num_cells - num_full), "dim")
        first.append(percent)
    return [first, *others]


def _below(view: View, width: int) -> Lines:
    """Say who is slow, and what the letters mean."""
    lines = []
    slow = next((worker for worker in view.workers if worker.times_slow), None)
    if slow is not None and slow.times_slow is not None:
        words = f"! worker {slow.rank} computes {min(slow.times_slow, 999):.1f} times as long"
        whole = f"{words} as the others"
        lines.append(cut(Text(whole if len(whole) <= width else words, "yellow"), width))
    steps = "of the last step" if view.num_steps == 1 else f"of the last {view.num_steps:,} steps"
    names = [Text(phase, style) for phase, style in zip(PHASES, STYLES, strict=True)]
    legend = Text("  ").join([*names, Text(steps, "dim")])
    if any(worker.shares for worker in view.workers) and legend.cell_len <= width:
        lines.append(legend)
    return lines
