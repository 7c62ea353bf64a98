"""What does the user see? A line for each diagnosis: ✓ ! ✗ ?, a sentence, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unisono.doctor.diagnoses import FINE, UNREAD, WARNING, WRONG, Diagnosis
from unisono.notices import can_show, shown_lines

_MARKS = {
    FINE: "[green]✓[/]",
    WARNING: "[yellow]![/]",
    WRONG: "[red]✗[/]",
    UNREAD: "[yellow]?[/]",
}
_PLAIN = {FINE: "ok", WARNING: "!", WRONG: "WRONG", UNREAD: "?"}
_NAME_WIDTH = 17


def print_diagnoses(console: Console, diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Print diagnoses as they come.

    Returns:
        All of them.
    """
    seen = []
    marks, arrow = (_MARKS, "→") if can_show("✓✗→", console.encoding) else (_PLAIN, "->")
    width = max(len(mark) for mark in _PLAIN.values()) if marks is _PLAIN else 1
    for one in diagnoses:
        seen.append(one)
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        table.add_column(no_wrap=True, width=width)
        table.add_column(no_wrap=True, width=_NAME_WIDTH)
        table.add_column(overflow="fold")
        text = escape(shown_lines(one.evidence))
        if one.remedy:
            text += f"\n{arrow} {escape(shown_lines(one.remedy))}"
        table.add_row(marks[one.verdict], one.check, text)
        console.print(table)
    return seen
