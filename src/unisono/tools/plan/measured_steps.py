"""Measures a program's steps here: on each number of workers, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.engine.step.records import Phase
from unisono.runtime.notices import plural
from unisono.tools.verify.reading import RawTrace
from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.trials import Program, Trial, trials_of
from unisono.training.events.step_sample import Seconds, without_pauses

_TURNS = 2
_STEPS_AT_LEAST = 4


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """What a step takes on some number of workers, in seconds: means over steps of all turns."""

    num_workers: int  # N
    num_steps: int  # how many were timed
    own_s: float  # loading and passes, in the mean of the workers
    slowest_s: float  # the same of the slowest worker of each step
    updating_s: float  # the optimizer
    exchange_s: float  # the rest: adding up, meetings, transfers, what lies between steps
    turns_s: tuple[float, ...]  # a step in each turn

    @property
    def step_s(self) -> float:
        """A step."""
        return self.slowest_s + self.updating_s + self.exchange_s


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured."""

    device: str  # what workers compute on
    num_shards: int  # S
    batch_size: int  # samples of a step, on any number of workers
    num_samples: int | None  # of an epoch; None: the data have no end
    gradient_bytes: int  # of all parameters
    steps: tuple[TimedSteps, ...]  # by number of workers, ascending
    state_bytes: int = 0  # of an element-wise optimizer's tensors


def measure_steps(
    program: Program,
    counts: Sequence[int],
    limits: Limits,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Measured:
    """Time steps of a program on each number of workers, as far as there are shards for them.

    Args:
        counts: on how many workers, ascending from 1.
        limits: for how long steps are timed, each time, and how a worker computes.

    Raises:
        ValueError: the program does not train with Unisono, fails, or takes too few steps.
        SystemExit: the user has ended it, with the status of a shell.
        OSError: there is no room for a copy of the working folder.
    """
    found: dict[int, list[Seconds]] = {}
    facts: dict[str, Any] = {}
    limits = replace(limits, module="unisono.tools.plan.timed_program")
    with trials_of(program, limits, environ) as trials:
        for turn in range(_TURNS):
            for count in counts:
                if count <= facts.get("num_shards", count):
                    say(f"timing steps on {plural(count, 'worker')}{', again' * bool(turn)}")
                    facts, times = _timed(trials.run(count, f"on-{count}-{turn}"))
                    found.setdefault(count, []).append(times)
    return Measured(**facts, steps=tuple(timed_steps(found[count]) for count in sorted(found)))


def timed_steps(turns: Sequence[Seconds]) -> TimedSteps:
    """Take steps apart.

    Args:
        turns: of each turn what workers told, of shape (steps, workers, entries): the seconds
            between a step and the one before, then those of each phase.
    """
    times = np.concatenate(turns)
    own_s = times[..., Phase.LOADING : Phase.WAITING].sum(axis=2)
    slowest_s = float(own_s.max(axis=1).mean())
    updating_s = float(times[..., Phase.UPDATING].mean())
    return TimedSteps(
        times.shape[1],
        len(times),
        float(own_s.mean()),
        slowest_s,
        updating_s,
        float(times.sum(axis=2).mean()) - slowest_s - updating_s,
        tuple(float(turn.sum(axis=2).mean()) for turn in turns),
    )


def _timed(trial: Trial) -> tuple[dict[str, Any], Seconds]:
    """Read the facts about a program that was run, and what its whole, warm steps took."""
    told = [_told(trial, trace) for trace in trial.traces]
    warm_rows, facts, first = told[0]
    of_ranks = [{step: times for step, _, times in rows} for *_, rows in told]
    common = [
        [one[step] for one in of_ranks]
        for step, is_full, _ in first[warm_rows:]
        if is_full and all(step in one for one in of_ranks)
    ]
    if not warm_rows or len(common) < _STEPS_AT_LEAST:
        raise ValueError(
            "SCRIPT must train for at least 15 steps or so with whole batches, so that they can be "
            f"timed, but ended after {len(first)}: let it go over more samples, for more epochs, "
            "or use a smaller `batch_size`."
        )
    return facts, without_pauses(np.array(common))


def _told(trial: Trial, trace: RawTrace) -> tuple[int, dict[str, Any], list[list[Any]]]:
    """Read what a worker has noted.

    Returns:
        In how many steps it grew warm; facts; of each step its number, whether it is full, times.
    """
    if trial.interrupted_by is not None:
        raise SystemExit(128 + trial.interrupted_by)
    if trial.failure:
        raise ValueError(
            f"SCRIPT must run until some of its steps were timed, but did not: {trial.failure}"
        )
    for event in trace.of("timed"):
        return event["warm_rows"], event["facts"], event["rows"]
    raise ValueError(
        "SCRIPT must train with `unisono.Trainer` or `unisono.Run`, as its steps are timed there, "
        "but took no step with either: call `fit` or `steps` in it, outside of `unisono.launch`."
    )
