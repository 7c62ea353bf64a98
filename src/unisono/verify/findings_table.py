"""What does the user see? A line for each check: ✓ ✗ ?, a sentence, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unisono.notices import can_show, shown_lines
from unisono.verify.findings import OK, UNKNOWN, WRONG, Finding, told

_MARKS = {OK: "[green]✓[/]", WRONG: "[red]✗[/]", UNKNOWN: "[yellow]?[/]"}
_PLAIN = {OK: "ok", WRONG: "WRONG", UNKNOWN: "?"}


def print_table(
    console: Console,
    program: str,
    world_sizes: Sequence[int],
    findings: Sequence[Finding],
    *,
    is_exact: bool = False,
) -> None:
    """Print the findings, cause first, and a sentence that sums them up."""
    marks, arrow = (_MARKS, "→") if can_show("✓✗→", console.encoding) else (_PLAIN, "->")
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    before = ""
    for finding in findings:
        text = escape(shown_lines(told(finding)))
        text, before = ("as above" if text == before else text), text
        if finding.remedy:
            text += f"\n{arrow} {escape(finding.remedy)}"
        table.add_row(marks[finding.verdict], finding.check, text)
    console.print(table)
    console.print(
        escape(summary(program, world_sizes, findings, is_exact=is_exact)), soft_wrap=True
    )


def summary(
    program: str,
    world_sizes: Sequence[int],
    findings: Sequence[Finding],
    *,
    is_exact: bool = False,
) -> str:
    """Sum the findings up in one sentence."""
    resumes = bool(findings) and findings[0].check.startswith("resume-")
    *most, last = map(str, world_sizes)
    sizes = f"{', '.join(most)} and {last}" if most else last
    what = "resuming" if resumes else f"training on {sizes} ranks"
    mistakes = [finding for finding in findings if finding.verdict == WRONG]
    unknowns = [finding for finding in findings if finding.verdict == UNKNOWN]
    if mistakes:
        return (
            f"{program}: {what} does not give the same result; the cause is `{mistakes[0].check}`."
        )
    if unknowns:
        num_open = f"{len(unknowns)} of {len(findings)}"
        return f"{program}: no mistake found, but {num_open} checks could not be made."
    how = "bit for bit" if is_exact else "but for rounding"
    return f"{program}: {what} gives the same result, {how}."
