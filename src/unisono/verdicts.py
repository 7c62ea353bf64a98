"""What checks have found: a verdict, a sentence, what to do; and a line for each: ✓ ! ✗ ?."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unisono.notices import can_show, shown_lines

OK, WARNING, WRONG, UNKNOWN = "ok", "warning", "wrong", "unknown"
_MARKS = {
    OK: "[green]✓[/]",
    WARNING: "[yellow]![/]",
    WRONG: "[red]✗[/]",
    UNKNOWN: "[yellow]?[/]",
}
_PLAIN = {OK: "ok", WARNING: "!", WRONG: "WRONG", UNKNOWN: "?"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    check: str  # the name of the question, such as `memory`
    # `"ok"`, `"warning"` (works, but not as it could), `"wrong"`, or `"unknown"` where nobody
    # could tell
    verdict: str
    evidence: str  # what was seen, in a sentence
    remedy: str = ""  # what to do; empty if nothing is


def print_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print a line for each: a mark, the check, what was seen, what to do."""
    marks, arrow = (_MARKS, "→") if can_show("✓✗→", console.encoding) else (_PLAIN, "->")
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    before = ""
    for one in findings:
        text = escape(shown_lines(one.evidence))
        text, before = ("as above" if text == before else text), text
        if one.remedy:
            text += f"\n{arrow} {escape(shown_lines(one.remedy))}"
        table.add_row(marks[one.verdict], one.check, text)
    console.print(table)
