"""What was seen of a machine: a verdict, a sentence, what to do; exit status, JSON, a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unisono.notices import can_show, shown_lines

FINE, WARNING, WRONG, UNREAD = "ok", "warning", "wrong", "unknown"
_MARKS = {
    FINE: "[green]✓[/]",
    WARNING: "[yellow]![/]",
    WRONG: "[red]✗[/]",
    UNREAD: "[yellow]?[/]",
}
_PLAIN = {FINE: "ok", WARNING: "!", WRONG: "WRONG", UNREAD: "?"}
_NAME_WIDTH = 17


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer to one question about a machine."""

    check: str  # its name, such as `memory`
    # `"ok"`, `"warning"` (works, but not as it could), `"wrong"`, or `"unknown"` where it
    # could not be read
    verdict: str
    evidence: str  # what was seen, in a sentence
    remedy: str = ""  # what to do; empty if nothing is
    facts: Mapping[str, Any] = field(default_factory=dict)  # the numbers, as plain JSON


Probe = Callable[[], Iterable[Diagnosis]]


def observe(probes: Mapping[str, Probe]) -> Iterator[Diagnosis]:
    """Make all checks, one after the other; one that fails says so."""
    for check, probe in probes.items():
        try:
            seen = list(probe())
        except Exception as error:  # whatever a strange machine has done to it
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            seen = [Diagnosis(check, UNREAD, f"This could not be read ({why}).")]
        yield from seen


def status_of(diagnoses: Sequence[Diagnosis]) -> int:
    """Return the exit status: 0 fine, 1 something is wrong."""
    return int(any(one.verdict == WRONG for one in diagnoses))


def as_json(diagnoses: Sequence[Diagnosis]) -> str:
    """Return all of it for programs."""
    checks = [asdict(one) for one in diagnoses]
    return json.dumps({"checks": checks}, indent=2, ensure_ascii=False, default=str)


def summary(diagnoses: Sequence[Diagnosis]) -> str:
    """Sum all up in one sentence."""
    words = {WRONG: "wrong", WARNING: "to look at", UNREAD: "could not be read"}
    parts = []
    for verdict, what in words.items():
        if found := [one.check for one in diagnoses if one.verdict == verdict]:
            parts.append(f"{len(found)} {what}: {', '.join(dict.fromkeys(found))}")
    return f"{'; '.join(parts)}." if parts else "Nothing is wrong with this machine."


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
