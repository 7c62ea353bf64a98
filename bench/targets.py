"""What must hold? The ratios that the project promises, each between two medians of one sitting."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bench.recovery import UNISONO, Kill
from bench.sides import SIDES
from bench.startup import LAUNCHED, PLAIN
from bench.workloads import WORKLOADS


@dataclass(frozen=True)
class Repeat:
    """One measurement of one side."""

    workload: str
    side: str
    repeat: int
    steps: int
    samples: int
    seconds: float
    threads: int
    data: str
    events_s: float | None = None  # of the seconds, in writing the event file on rank 0

    @property
    def ms_per_step(self) -> float:
        return 1000 * self.seconds / self.steps

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ms_per_step": self.ms_per_step,
            "samples_per_s": self.samples_per_s,
        }


@dataclass(frozen=True)
class RateTarget:
    """The rate of ``side`` must be at least ``at_least`` times that of ``reference``."""

    workload: str
    side: str
    reference: str
    at_least: float


@dataclass(frozen=True)
class Verdict:
    """A promise, the figure that was seen, and whether it was kept."""

    promise: str
    seen: float
    is_met: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# The promises are for the optimizer that a person in a hurry would choose, the fused one; the
# table also shows Unisono with the optimizer as usual, which compares like with like.
RATE_TARGETS = (
    RateTarget("cnn8", "unisono-fused", "ddp-tuned", 1.7),
    RateTarget("cnn8", "unisono-fused", "ddp", 2.1),
    RateTarget("cnn8", "unisono-fused-events", "ddp", 2.2),
    RateTarget("cnn8", "ddp-shared", "ddp", 1.5),
    RateTarget("cnn8-items", "unisono-fused-events", "ddp", 1.7),
    RateTarget("cnn8-items", "unisono-events", "ddp", 1.7),
    RateTarget("cnn64", "unisono-fused", "ddp-tuned", 1.05),
    RateTarget("cnn64", "unisono-fused", "passes", 0.95),
    RateTarget("cnn64", "unisono-fused-gloo", "ddp-tuned", 0.95),
    RateTarget("cnn64", "unisono-fused-staged", "unisono-fused", 0.8),
    RateTarget("mlp", "unisono-fused", "ddp-tuned", 1.3),
    RateTarget("gpt", "unisono-fused", "ddp-tuned", 1.05),
    RateTarget("gpt", "unisono-fused", "passes", 0.95),
)
EVENTS_WORKLOAD, EVENTS_AT_MOST = "cnn8", 0.01
STARTUP_AT_MOST = 1.15
RECOVERY_AT_MOST_S = 0.1


def median_rates(repeats: list[Repeat], workload: str) -> dict[str, float]:
    """Map each side that was measured to its median rate, in samples per second."""
    rates: dict[str, list[float]] = {}
    for repeat in repeats:
        if repeat.workload == workload:
            rates.setdefault(repeat.side, []).append(repeat.samples_per_s)
    return {side: statistics.median(values) for side, values in rates.items()}


def rate_verdicts(repeats: list[Repeat]) -> Iterator[Verdict]:
    """Judge each target whose two sides were measured."""
    for target in RATE_TARGETS:
        rates = median_rates(repeats, target.workload)
        if target.side in rates and target.reference in rates:
            seen = rates[target.side] / rates[target.reference]
            promise = (
                f"{WORKLOADS[target.workload].title}: {SIDES[target.side].title} "
                f"≥ {target.at_least} × {SIDES[target.reference].title}"
            )
            yield Verdict(promise, seen, seen >= target.at_least)


def events_verdicts(repeats: list[Repeat]) -> Iterator[Verdict]:
    """Judge what the event file costs the shortest step: its work is timed where it is done."""
    shares = [
        repeat.events_s / repeat.seconds
        for repeat in repeats
        if repeat.workload == EVENTS_WORKLOAD and repeat.events_s is not None
    ]
    if shares:
        promise = (
            f"{WORKLOADS[EVENTS_WORKLOAD].title}: the event file takes "
            f"≤ {100 * EVENTS_AT_MOST:.0f} % of a step, as a share of it"
        )
        seen = statistics.median(shares)
        yield Verdict(promise, seen, seen <= EVENTS_AT_MOST)


def startup_verdict(seconds: dict[str, list[float]]) -> Verdict:
    """Judge the start-up; ``seconds`` maps each way to start to its repeats."""
    seen = statistics.median(seconds[LAUNCHED]) / statistics.median(seconds[PLAIN])
    promise = f"Start-up: unisono run ≤ {STARTUP_AT_MOST} × python"
    return Verdict(promise, seen, seen <= STARTUP_AT_MOST)


def recovery_verdict(kills: list[Kill]) -> Verdict:
    """Judge the time that a kill costs, two undisturbed steps aside: see ``bench.recovery``."""
    own = [kill for kill in kills if kill.way == UNISONO]
    seen = statistics.median(kill.to_committed_s for kill in own)
    at_most = RECOVERY_AT_MOST_S + 2 * statistics.median(kill.step_s for kill in own)
    promise = (
        f"Recovery: SIGKILL to the next committed step ≤ {RECOVERY_AT_MOST_S} s + step, "
        f"which is {at_most:.3f} s for the two steps that are counted"
    )
    return Verdict(promise, seen, seen <= at_most)
