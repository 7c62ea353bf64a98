"""Stops a program at several steps, starts it again, and compares with an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.verify.bit_checks import (
    KINDS,
    WORKS,
    Resumption,
    StepRecord,
    check_resumptions,
    compare,
    step_records,
)
from unisono.verify.findings import Verdict, in_order, unknown
from unisono.verify.recorder import Limits
from unisono.verify.trials import Program, Trial, Trials, trials_of

_ALL_BATCHES = 10**9
_STOPS = (0.25, 0.5, 0.75)
"""Where a run is stopped, in parts of the undisturbed one."""

Records = list[list[StepRecord]]


def verify_resume(
    program: Program,
    world_size: int,
    limits: Limits,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Verdict:
    """Compare runs of a program that resumes by itself with an undisturbed one, bit for bit."""
    limits = replace(limits, batches=_ALL_BATCHES, full_steps=0, replays=True)
    with trials_of(program, limits, environ) as trials:
        return _Replay(trials, world_size, limits, say).verdict()


@dataclass(frozen=True)
class _Replay:
    _trials: Trials
    _world_size: int
    _limits: Limits
    _say: Callable[[str], None]

    def verdict(self) -> Verdict:
        """Run, stop, resume and compare."""
        self._say("running undisturbed")
        trial, undisturbed = self._run(self._limits, "undisturbed")
        num_steps = min(map(len, undisturbed))
        if trial.failure or num_steps < 2:
            return self._ended(trial, "The program took fewer than two steps of an optimizer.")
        stops = sorted({max(1, round(num_steps * part)) for part in _STOPS})
        resumptions = []
        for stop in stops:
            self._say(f"stopping after {stop} steps, and resuming")
            trial, found = self._resume(undisturbed, stop, f"stopped-{stop}")
            if trial.failure:
                return self._ended(trial, f"Stopped after {stop} steps, it did not run again.")
            resumptions.append(found)
        self._say(f"stopping after {stops[-1]} steps, and resuming with damage")
        trial, broken = self._resume(undisturbed, stops[-1], "damaged", damages=True)
        if trial.failure:
            return self._ended(trial, "The run that was damaged on purpose did not end.")
        findings = in_order(check_resumptions(resumptions, broken), (*KINDS, WORKS))
        return Verdict((self._world_size,), findings, is_exact=True)

    def _run(self, limits: Limits, name: str, files: Path | None = None) -> tuple[Trial, Records]:
        self._trials.limits = limits
        trial = self._trials.run(self._world_size, name, files=files)
        return trial, list(map(step_records, trial.traces))

    def _resume(
        self, undisturbed: Records, stop: int, name: str, *, damages: bool = False
    ) -> tuple[Trial, Resumption]:
        files = self._trials.folder / f"{name}-files"
        trial, _ = self._run(replace(self._limits, steps=stop), name, files)
        if trial.failure:
            return trial, Resumption(stop)
        limits = replace(self._limits, damages=damages)
        trial, resumed = self._run(limits, f"{name}-resumed", files)
        return trial, compare(undisturbed, resumed, stop)

    def _ended(self, trial: Trial, why: str) -> Verdict:
        findings = [unknown(check, why) for check in (*KINDS, WORKS)]
        return Verdict((self._world_size,), findings, trial.trouble, trial.interrupted_by)
