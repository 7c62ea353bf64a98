"""Measures a program's steps here: on one worker and on several, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.faults import FAULTS_VARIABLE
from unisono.forecast.spread import Values
from unisono.forecast.step_profile import BY_STEP, StepProfile, TimedSteps
from unisono.launch.recovery import RESTARTS
from unisono.train.step_window import COLUMNS, StepWindow, times_of
from unisono.verify.raw_trace import read_trace
from unisono.verify.trials import Limits, Program, Trial, Trials, trials_of

STEPS_AT_LEAST = 4
WORKERS_AT_MOST = 8
_TURNS = 2
_KILLED_IN_STEP = 8
_SUMMING, _UPDATING = COLUMNS.index("summing"), COLUMNS.index("updating")
_OWN = slice(COLUMNS.index("loading"), COLUMNS.index("waiting"))
_DELAYED = COLUMNS.index("delayed")


class InterruptedMeasurementError(Exception):
    """The user ended it, with the signal `signum`."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


@dataclass(frozen=True, slots=True)
class Measurement:
    """How a program is measured."""

    program: Program  # what to run
    seconds: float  # for how long steps are timed, each time
    timeout_s: float  # after which a run of the program is ended
    threads: int  # of each worker
    environ: Mapping[str, str]  # the variables it gets
    say: Callable[[str], None]  # shows a line about what is under way

    @property
    def limits(self) -> Limits:
        """How much of the program is run."""
        return Limits(
            timing_s=self.seconds,
            timeout_s=self.timeout_s,
            threads=self.threads,
            restarts=RESTARTS,  # as `unisono run`: with snapshots
            module="unisono.forecast.timed_program",
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured."""

    profile: StepProfile  # the steps
    device: str  # what workers compute on
    startup_s: float  # from the start of one worker to its first step


def measure_steps(measurement: Measurement, most_workers: int) -> Measured:
    """Time steps of a program on one worker, and on as many as there are shards and devices for.

    Args:
        measurement: how.
        most_workers: on how many at most.

    Raises:
        ValueError: the program does not train with Unisono, fails, or takes too few steps.
        InterruptedMeasurementError: the user has ended it.
        OSError: there is no room for a copy of the working folder.
    """
    found: dict[int, list[TimedSteps]] = {}
    facts: dict[str, Any] = {}
    shares: dict[int, list[Values]] = {}
    with trials_of(measurement.program, measurement.limits, measurement.environ) as trials:
        for turn in range(_TURNS):
            counts = [1, min(most_workers, WORKERS_AT_MOST, facts.get("num_shards", most_workers))]
            for count in dict.fromkeys(counts):
                if count > facts.get("num_shards", count):
                    continue
                told, rows = _timed(trials, measurement, count, turn)
                facts = facts or told
                steps, of_own = _steps_of(rows, told, turn)
                found.setdefault(count, []).append(steps)
                shares.setdefault(count, []).append(of_own)
    loading, backward, _ = np.mean(shares[1], axis=0)
    delayed = np.mean(shares[max(shares)], axis=0)[-1]
    alone, *several = (joined(found[count]) for count in sorted(found))
    profile = StepProfile(
        alone,
        several[-1] if several else None,
        facts["batch_size"],
        facts["num_samples"],
        tuple(facts["gradient_bytes"]),
        tuple(facts["ready"]),
        backward_share=float(backward),
        loading_share=float(loading),
        delayed_share=float(delayed),
        exchange=facts["exchange"],
    )
    return Measured(profile, facts["device"], facts["startup_s"])


def measure_recovery(measurement: Measurement, num_workers: int, step_s: float) -> float:
    """Kill a worker, and give the seconds that this costs until all is as before.

    Args:
        measurement: how; the time it takes does not depend on `seconds`.
        num_workers: on how many, at least 2.
        step_s: what a step takes undisturbed.

    Raises:
        ValueError, InterruptedMeasurementError, OSError: as of :func:`measure_steps`.
    """
    fault = {FAULTS_VARIABLE: f"kill:rank=1,step={_KILLED_IN_STEP}"}
    limits = replace(measurement.limits, timing_s=measurement.timeout_s)
    measurement.say("killing a worker, to see how long the run needs to recover")
    with trials_of(measurement.program, limits, {**measurement.environ, **fault}) as trials:
        trial = trials.run(num_workers, "killed")
        rows = _told(trial, 0)[1]
    sizes = [size for _, size, _, _ in rows]
    if num_workers not in sizes[sizes.index(min(sizes)) :] or min(sizes) == num_workers:
        raise ValueError(
            "SCRIPT must go on for some steps after a worker is replaced, so that the time can be "
            "measured, but ended before: pass `--recovery` with the time that it takes."
        )
    (first, *_, before), (last, *_, after) = rows[_KILLED_IN_STEP - 1], rows[-1]
    lost_s: float = after[0] - before[0] - (last - first) * step_s
    return max(lost_s, 0.0)


def _timed(
    trials: Trials, measurement: Measurement, count: int, turn: int
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Run the program on so many workers, and read what each has told of which step."""
    workers = "1 worker" if count == 1 else f"{count} workers"
    again = ", again" if turn else ""
    measurement.say(f"timing steps on {workers}{again}")
    trial = trials.run(count, f"on-{count}-{turn}")
    told = [_told(trial, rank) for rank in range(count)]
    facts = told[0][0]
    steps = [{step: (is_full, times) for step, _, is_full, times in rows} for _, rows in told]
    common = [step for step, *_ in told[0][1][facts["warm_rows"] :]]
    common = [step for step in common if all(step in one for one in steps)]
    if len(common) < STEPS_AT_LEAST:
        number = len(told[0][1])
        raise ValueError(
            f"SCRIPT must train for at least 15 steps or so, so that they can be timed, but ended "
            f"after {number}: let it go over more samples, or for more epochs."
        )
    rows = [[[one[step][1] for one in steps], steps[0][step][0]] for step in common]
    return facts, rows


def _told(trial: Trial, rank: int) -> tuple[dict[str, Any], list[list[Any]]]:
    """Read what a worker has noted: facts, and (step, workers, whether it is full, times)."""
    if trial.interrupted_by is not None:
        raise InterruptedMeasurementError(trial.interrupted_by)
    if trial.failure:
        raise ValueError(
            f"SCRIPT must run until some of its steps were timed, but did not: {trial.failure}"
        )
    for event in read_trace(trial.folder, rank).events:
        if event["t"] == "timed":
            return event["facts"], event["rows"]
    raise ValueError(
        "SCRIPT must train with `unisono.Trainer` or `unisono.Run`, as its steps are timed there, "
        "but took no step with either: call `fit` or `steps` in it, outside of `unisono.launch`; "
        "or forecast from numbers, for example with `unisono plan --samples 50000 --batch 128 "
        "--step 0.2s --gradients 100MB`."
    )


def _steps_of(
    rows: Sequence[Sequence[Any]], facts: Mapping[str, Any], turn: int
) -> tuple[TimedSteps, Values]:
    """Take the times of steps apart.

    Returns:
        The steps; and which part of the time of shards was loading, which backward passes, and in
        which workers waited for a free core, as far as the kernel was asked.
    """
    told = times_of([(times, bool(is_full)) for times, is_full in rows])
    num_workers = told.shape[1]
    window = StepWindow(tuple(range(num_workers)), told, (), facts["batch_size"])
    times = window.times_without_pauses
    if len(times) < STEPS_AT_LEAST - 1:
        times = told
    if len(times) < STEPS_AT_LEAST - 1:
        raise ValueError(
            f"SCRIPT must train for some steps with whole batches, so that they can be timed, but "
            f"had {len(times)}: let it go over more samples, or use a smaller `batch_size`."
        )
    own: Values = times[..., _OWN]
    own_s, wall_s = own.sum(axis=2), times[..., :_DELAYED].sum(axis=2).mean(axis=1)
    summing_s = times[..., _SUMMING].mean(axis=1)
    updating_s = times[..., _UPDATING].mean(axis=1)
    rest_s = wall_s - own_s.max(axis=1) - summing_s - updating_s
    loading, _, backward = own.mean(axis=(0, 1)) / own_s.mean()
    delayed = np.nan_to_num(times[..., _DELAYED]).mean() / own_s.mean()
    num_shards = facts["num_shards"]
    size, longer = divmod(num_shards, num_workers)
    steps = TimedSteps(
        tuple(size + (rank < longer) for rank in range(num_workers)),
        own_s,
        summing_s,
        updating_s,
        rest_s,
        np.full(len(own_s), turn),
    )
    return steps, np.array([loading, backward, delayed])


def joined(parts: Sequence[TimedSteps]) -> TimedSteps:
    """Put the steps of several turns behind each other."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(one, name) for one in parts]) for name in BY_STEP
    }
    return replace(parts[0], **columns)
