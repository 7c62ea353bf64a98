"""Verifies one program: runs it, reads what was recorded, asks all checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.verdicts import Finding
from unisono.verify.bit_checks import check_exact, exact_run
from unisono.verify.evaluation_checks import check_evaluations, with_means_of_evaluations
from unisono.verify.feed import feed_of
from unisono.verify.findings import CAUSES_FIRST, Verdict, in_order, unknown
from unisono.verify.gradient_checks import check_gradients
from unisono.verify.raw_trace import Identities, RawTrace
from unisono.verify.reading import resolve
from unisono.verify.recorder import Limits
from unisono.verify.sample_checks import check_samples
from unisono.verify.state_checks import check_states
from unisono.verify.trace import TwoRuns
from unisono.verify.trials import Program, Trial, Trials, num_ranks, trials_of

_CHECKS = (check_samples, check_gradients, check_states, check_evaluations)
_MORE_BATCHES = 8


def verify(
    program: Program,
    world_size: int,
    limits: Limits,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Verdict:
    """Run a program on `world_size` ≥ 2 ranks and on one, and compare.

    One that trains with Unisono runs on every number up to it.
    """
    with trials_of(program, limits, environ) as trials:
        return _Verification(trials, world_size, limits, say).verdict()


@dataclass(frozen=True)
class _Verification:
    _trials: Trials
    _world_size: int
    _limits: Limits
    _say: Callable[[str], None]

    def verdict(self) -> Verdict:
        """Run and judge."""
        trial = self._run(self._world_size, "several")
        if not trial.failure and not _has_steps(trial):
            # It accumulates more passes than an iteration was cut to.
            longer = replace(self._limits, batches=self._limits.batches * _MORE_BATCHES)
            self._trials.limits = longer
            trial = self._run(self._world_size, "several-longer")
        if trial.interrupted_by is not None or not _has_steps(trial):
            return self._unverified(trial)
        if any(trace.of("exact") for trace in trial.traces):
            return self._exact(trial)
        return self._compared(trial)

    def _run(self, world_size: int, name: str, feed: Path | None = None) -> Trial:
        self._say(f"running on {num_ranks(world_size)}")
        return self._trials.run(world_size, name, feed)

    def _unverified(self, trial: Trial) -> Verdict:
        if trial.failure:
            why = "The program did not come to a step of an optimizer on all ranks."
        elif any(trace.events[:-1] for trace in trial.traces):
            why = "The program ended without a step of an optimizer of torch."
        else:
            why = "The program ended without a torch module, loader or optimizer on its ranks."
        remedy = "Verify a script that trains; what it printed is above." if trial.failure else ""
        findings = [unknown(check, why, remedy) for check in CAUSES_FIRST]
        return Verdict((1, self._world_size), findings, trial.trouble, trial.interrupted_by)

    def _exact(self, trial: Trial) -> Verdict:
        """Compare the bits of runs on all numbers of workers up to that of the first run."""
        sizes, trouble = tuple(range(1, self._world_size + 1)), trial.trouble
        runs = {self._world_size: exact_run(trial.traces)}
        for world_size in reversed(sizes[:-1]):
            trial = self._run(world_size, f"on-{world_size}")
            trouble = trouble or trial.trouble
            if trial.interrupted_by is not None:
                return Verdict(sizes, (), trouble, trial.interrupted_by)
            runs = {world_size: exact_run(trial.traces), **runs}
        return Verdict(sizes, in_order(check_exact(runs)), trouble, is_exact=True)

    def _compared(self, trial: Trial) -> Verdict:
        sizes = (1, self._world_size)
        alone = self._run_one(trial, "one")
        num_passes = [_passes_of_first_step(one.traces[0]) for one in (alone, trial)]
        if not alone.failure and num_passes[0] == self._world_size * num_passes[1] > 0:
            # It accumulates N times as many passes on one rank, so that each is as large.
            self._say(f"running on 1 rank again, with {self._world_size} times the passes")
            alone = self._run_one(trial, "one-accumulating", one_by_one=True)
        if alone.interrupted_by is not None:
            return Verdict(sizes, (), alone.trouble, alone.interrupted_by)
        findings = judge(trial.traces, alone.traces[0])
        return Verdict(sizes, findings, trial.trouble or alone.trouble)

    def _run_one(self, trial: Trial, name: str, *, one_by_one: bool = False) -> Trial:
        feed = self._trials.folder / f"{name}.json"
        feed.write_text(json.dumps(feed_of(trial.traces, one_by_one=one_by_one)))
        return self._run(1, name, feed)


def judge(traces: Sequence[RawTrace], one: RawTrace) -> tuple[Finding, ...]:
    """Ask all checks about a run on several ranks and one on one."""
    identities = Identities([*traces, one])
    ranks = tuple(resolve(trace, identities) for trace in traces)
    seen = TwoRuns(ranks, resolve(one, identities))
    findings = [finding for check in _CHECKS for finding in check(seen)]
    return in_order(with_means_of_evaluations(findings, seen))


def _has_steps(trial: Trial) -> bool:
    return all(trace.of("step", "step-bits") for trace in trial.traces)


def _passes_of_first_step(trace: RawTrace) -> int:
    kinds = [event["t"] for event in trace.of("backward", "step")]
    return kinds.index("step") if "step" in kinds else 0
