"""What was found, cause first: the exit status, the JSON, and a line for each check: ✓ ✗ ?."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unisono.notices import can_show, shown_lines

OK, WRONG, UNKNOWN = "ok", "wrong", "unknown"
EQUAL, DIFFERENT, NOT_VERIFIED = 0, 1, 2

# In both, what makes others follow comes before them.
GRADIENT_CHECKS = (
    "clip-before-average",
    "accumulation-not-synced",
    "gradients-not-averaged",
    "parameter-not-averaged",
    "gradient-times-n",
    "gradient-over-n",
    "mean-of-means",
    "weights-of-tokens",
)
CAUSES_FIRST = (
    "split-differs",
    "samples-same-on-all-ranks",
    "samples-lost",
    "epoch-order-fixed",
    *GRADIENT_CHECKS,
    "learning-rate-scaled",
    "schedule-too-fast",
    "loader-randomness-same",
    "randomness-same-on-all-ranks",
    "buffers-differ",
    "parameters-differ",
    "evaluation-partial",
    "evaluation-counts-twice",
)
_ORDER = {WRONG: 0, UNKNOWN: 1, OK: 2}
_MARKS = {OK: "[green]✓[/]", WRONG: "[red]✗[/]", UNKNOWN: "[yellow]?[/]"}
_PLAIN = {OK: "ok", WRONG: "WRONG", UNKNOWN: "?"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    check: str  # one of `CAUSES_FIRST`, or of those of a resumed run
    verdict: str  # `"ok"`, `"wrong"` or `"unknown"`
    evidence: str  # what was seen
    remedy: str = ""  # what to do; empty if nothing is
    follows: str = ""  # the check that is the cause; empty for a cause


def ok(check: str, evidence: str) -> Finding:
    """Say that all is well."""
    return Finding(check, OK, evidence)


def wrong(check: str, evidence: str, remedy: str) -> Finding:
    """Say what is wrong."""
    return Finding(check, WRONG, evidence, remedy)


def unknown(check: str, evidence: str, remedy: str = "") -> Finding:
    """Say why something could not be verified."""
    return Finding(check, UNKNOWN, evidence, remedy)


def around_mistake(
    mistake: Finding, checks: Sequence[str], *, were_well: bool = False
) -> list[Finding]:
    """Put one mistake among the checks; what those after it cannot show any more is unknown.

    Args:
        mistake: the first one.
        checks: all, cause first.
        were_well: whether those after it are known to be well all the same.
    """
    at = checks.index(mistake.check)
    return [
        mistake
        if number == at
        else ok(check, "No sign of it.")
        if number < at or were_well
        else unknown(check, f"Hidden behind `{mistake.check}`.")
        for number, check in enumerate(checks)
    ]


def in_order(findings: Iterable[Finding], checks: Sequence[str] = CAUSES_FIRST) -> list[Finding]:
    """Put the cause first, what follows from it next, and mark that."""
    ordered = sorted(findings, key=lambda f: (_ORDER[f.verdict], checks.index(f.check)))
    cause = ordered[0].check if ordered and ordered[0].verdict == WRONG else ""
    return [
        replace(finding, follows=cause)
        if finding.verdict == WRONG and finding.check != cause
        else finding
        for finding in ordered
    ]


def status_of(findings: Sequence[Finding]) -> int:
    """Return the exit status: 0 equal, 1 different, 2 could not be verified."""
    verdicts = {finding.verdict for finding in findings}
    if WRONG in verdicts:
        return DIFFERENT
    return NOT_VERIFIED if UNKNOWN in verdicts or not verdicts else EQUAL


def as_json(program: str, world_sizes: Sequence[int], findings: Sequence[Finding]) -> str:
    """Return the answer for programs."""
    return json.dumps(
        {
            "program": program,
            "world_sizes": list(world_sizes),
            "findings": [
                {
                    "check": finding.check,
                    "verdict": finding.verdict,
                    "evidence": told(finding),
                    "remedy": finding.remedy,
                }
                for finding in findings
            ],
        },
        indent=2,
        ensure_ascii=False,
    )


def told(finding: Finding) -> str:
    """Return the evidence, with what it follows from."""
    if not finding.follows:
        return finding.evidence
    return f"Follows from `{finding.follows}`, most likely. {finding.evidence}"


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
