"""What do the measurements say, and what is to be expected of two workers? Pure verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unisono.doctor.diagnoses import FINE, WARNING, Diagnosis
from unisono.quantities import duration

_SLOW_MEETING_S = 1e-3
_SPOILT = 0.6
_EXAMPLE_S = 0.1


def judge_measured(found: Mapping[str, Any], num_cores: int) -> Iterator[Diagnosis]:
    """Judge what ``measuring.py`` has found.

    Args:
        found: times, in seconds.
        num_cores: that workers may use.
    """
    yield _meetings(found["meeting_s"], num_cores)
    yield _memory(found)
    yield _passes(found, num_cores)
    yield _sums(found)


def _meetings(seconds: float, num_cores: int) -> Diagnosis:
    said, verdict, remedy = f"Two workers meet in {duration(seconds)}.", FINE, ""
    if seconds > _SLOW_MEETING_S:
        why = "one core serves both" if num_cores == 1 else "something else takes the cores"
        verdict, remedy = WARNING, f"That is long: {why}; see `cores` and `load`."
    return Diagnosis("meetings", verdict, said, remedy, {"seconds": seconds})


def _memory(found: Mapping[str, Any]) -> Diagnosis:
    alone, together = (found["copy_bytes"] / seconds / 1e9 for seconds in found["copy_s"])
    said = (
        f"A worker moves {alone:.1f} GB/s of memory alone, and {together:.1f} GB/s while another "
        "does the same."
    )
    facts = {"alone_gb_per_s": alone, "together_gb_per_s": together}
    return Diagnosis("memory-bandwidth", FINE, said, facts=facts)


def _passes(found: Mapping[str, Any], num_cores: int) -> Diagnosis:
    alone, together = found["pass_s"]
    speed = alone / together
    said = (
        f"A forward and backward pass takes {duration(alone)} alone, and {duration(together)} "
        f"while another worker computes one: {speed:.0%} of the speed."
    )
    verdict, remedy = (WARNING if speed < _SPOILT else FINE), ""
    if speed < _SPOILT and num_cores == 1:
        remedy = "The workers have one core between them."
    elif speed < _SPOILT:
        remedy = (
            "The cores share something: hyper-threads of one core, a limit of the container, "
            "or other programs. Start fewer workers than cores."
        )
    facts = {"alone_s": alone, "together_s": together}
    return Diagnosis("passes", verdict, said, remedy, facts)


def _sums(found: Mapping[str, Any]) -> Diagnosis:
    alone, together = found["pass_s"]
    by_size = {int(count): seconds for count, seconds in found["sum_s"].items()}
    small, large = min(by_size), max(by_size)
    expected_s = _EXAMPLE_S / 2 * max(1.0, together / alone) + by_size[large]
    said = (
        f"Beside its passes, a step of two workers takes {duration(by_size[small])} with "
        f"{small:,} parameters and {duration(by_size[large])} with {large:,}. So with {large:,} "
        f"parameters, expect a step of {duration(_EXAMPLE_S)} on one worker to take about "
        f"{duration(expected_s)} on two."
    )
    return Diagnosis("sums", FINE, said, facts={"seconds": found["sum_s"]})
