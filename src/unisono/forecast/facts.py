"""A forecast as plain JSON: what it is made of, what it supposes, and what is expected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.forecast.cluster import Cluster
from unisono.forecast.outlook import Expectation, Failures, in_words
from unisono.forecast.step_profile import MEASURED, SHARED, StepProfile, TimedSteps

_BUSY = 0.05


@dataclass(frozen=True, slots=True)
class Forecast:
    """All that `unisono plan` tells."""

    program: str  # the script; empty where numbers were given
    device: str  # what was measured; empty likewise
    profile: StepProfile  # this and the next three: what the forecast is made of
    cluster: Cluster
    failures: Failures
    epochs: float | None
    rows: Sequence[Expectation]  # what is expected, by number of workers

    @property
    def as_json(self) -> dict[str, Any]:
        """The forecast as plain JSON; times in seconds, sizes in bytes."""
        profile, rows = self.profile, self.rows
        causes = dict.fromkeys(row.limited_by for row in rows if row.limited_by)
        return {
            "program": self.program or None,
            "device": self.device or None,
            "is_measured": profile.is_measured,
            "measured": [_told(steps) for steps in self._measured] if profile.is_measured else [],
            "batch_size": profile.batch_size,
            "shards": profile.num_shards,
            "num_samples": profile.num_samples,
            "epochs": self.epochs,
            "gradient_bytes": sum(profile.gradient_bytes),
            "exchange": profile.exchange if profile.is_measured else None,
            "step_s_alone": self._step_s,
            "epoch_s_alone": self._epoch_s_alone,
            "assumptions": list(self._assumptions()),
            "causes": {cause: in_words(cause) for cause in causes},
            "rows": [row.as_json for row in rows],
        }

    @property
    def _measured(self) -> list[TimedSteps]:
        several = self.profile.together
        return [self.profile.alone, *([several] if several is not None else [])]

    @property
    def _epoch_s_alone(self) -> float | None:
        """An epoch of one worker without failures, by its samples: the ideal line begins here."""
        profile = self.profile
        if profile.num_samples is None:
            return None
        return self._step_s * profile.num_samples / profile.batch_size

    def _assumptions(self) -> Iterator[str]:
        """Say what is known and what is supposed, in sentences."""
        profile, rows = self.profile, self.rows
        if profile.is_measured:
            yield from self._of_measurements()
        else:
            yield (
                f"A device takes {_seconds(self._step_s)} for {profile.batch_size:,} samples. Each "
                "worker has as many, so the batch grows with them. Within a host, gradients cost "
                "nothing."
            )
        if grown := [row.workers for row in rows if not row.is_same_run and profile.is_measured]:
            yield (
                f"From {grown[0]:,} workers on the batch grows with them: other results than "
                f"with a batch of {profile.batch_size:,} and {profile.num_shards:,} shards."
            )
        yield from self._of_hosts()
        yield from self._of_failures()

    @property
    def _step_s(self) -> float:
        return float(self.profile.alone.step_s.mean())

    def _of_measurements(self) -> Iterator[str]:
        profile = self.profile
        measured = " and ".join(
            f"{one.num_workers} worker{'s' * (one.num_workers > 1)} "
            f"({_seconds(float(one.step_s.mean()))} a step, {len(one.step_s):,} steps)"
            for one in self._measured
        )
        yield (
            f"Measured on {measured}, {self.device}: a batch of {profile.batch_size:,} in "
            f"{profile.num_shards:,} shards, loading {profile.loading_share:.0%} of their time, "
            f"{sum(profile.gradient_bytes) / 1e6:,.3g} MB of gradients."
        ).replace("%", " %")
        if profile.delayed_share > _BUSY:
            yield (
                f"Workers waited {profile.delayed_share:.0%} of their time for a free core: other "
                "programs used this machine, and the forecast is for one as busy."
            ).replace("%", " %")
        most = self._measured[-1].num_workers
        if self.rows[-1].workers > most:
            yield (
                f"More than {most} worker{'s' * (most > 1)}: simulated, not measured. The band is "
                "what the measurements leave open, not what the model leaves out."
            )
        if profile.exchange != SHARED:
            yield f"Transfers within a host ({profile.exchange}) grow with its number of workers."
        yield "Without validation, checkpoints and starting up."

    def _of_hosts(self) -> Iterator[str]:
        cluster = self.cluster
        most = max(row.hosts for row in self.rows)
        has = "a device for each worker"
        if cluster.cores is not None:
            has = f"{cluster.cores:,} core{'s' * (cluster.cores > 1)} (or GPUs) for its workers"
        if most == 1:
            yield f"One host, with {has}."
            return
        speed = f"{cluster.bandwidth * 8 / 1e9:,.3g} Gbit/s"
        yield (
            f"Up to {most:,} hosts, each with {has} and a link of {speed} each way and "
            f"{cluster.latency_s * 1e6:,.3g} µs. Several hosts were not run: what the links take "
            "is computed, bucket by bucket, beside the last backward pass."
        )
        if cluster.copying_s:
            yield (
                f"A byte that is sent, received and added up takes a core of this machine "
                f"{cluster.copying_s * 1e9:.2g} ns, which its worker lacks if it has no other."
            )

    def _of_failures(self) -> Iterator[str]:
        failures = self.failures
        if not math.isfinite(failures.mtbf_s):
            yield "No failures."
            return
        text = f"A worker fails every {failures.mtbf_s / 3600:,.6g} h"
        if any(row.hosts == 1 for row in self.rows):
            text += f", which costs {_seconds(failures.recovery_s)}"
        if any(row.hosts > 1 for row in self.rows):
            text += (
                f"; on several hosts all start again: {_seconds(failures.restart_s)} and half of "
                f"the {_seconds(failures.checkpoint_s)} between checkpoints"
            )
        yield f"{text}."


def _told(steps: TimedSteps) -> dict[str, Any]:
    return {
        "workers": steps.num_workers,
        "steps": len(steps.step_s),
        **{name: float(getattr(steps, name).mean()) for name in ("step_s", *MEASURED)},
    }


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
