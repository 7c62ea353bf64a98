"""What was seen of a machine: a verdict, a sentence, what to do; the exit status; the JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FINE, WARNING, WRONG, UNREAD = "ok", "warning", "wrong", "unknown"


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


def size(num_bytes: float) -> str:
    """Write a number of bytes as ``3.9 GiB`` or ``64 MiB``."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            digits = 0 if num_bytes >= 100 * factor or unit == "MiB" else 1
            return f"{num_bytes / factor:.{digits}f} {unit}"
    return f"{num_bytes / 1024:.0f} KiB"
