"""What was found, cause first; the exit status; the JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
