"""Verifies one program: runs it, reads what was recorded, asks all checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.verify.evaluation_checks import check_evaluations
from unisono.verify.evaluation_means import with_means_of_evaluations
from unisono.verify.exact_checks import check_exact, exact_run
from unisono.verify.feed import feed_of
from unisono.verify.findings import CAUSES_FIRST, Finding, in_order, unknown
from unisono.verify.gradient_checks import check_gradients
from unisono.verify.identities import Identities
from unisono.verify.rank_trace import TwoRuns
from unisono.verify.raw_trace import RawTrace, read_trace
from unisono.verify.reading import resolve
from unisono.verify.sample_checks import check_samples
from unisono.verify.state_checks import check_states
from unisono.verify.trials import Limits, Program, Trial, Trials, trials_of

_MORE_BATCHES = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer."""

    world_sizes: tuple[int, ...]  # on how many ranks the program ran
    findings: tuple[Finding, ...]  # cause first
    trouble: str = ""  # why a run did not end well; empty if all did
    interrupted_by: int | None = None  # the signal that the user ended it with
    is_exact: bool = False  # bits were compared


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
        trial, traces = self._run(self._world_size, "several")
        if not trial.failure and not _have_steps(traces):
            # It accumulates more passes than an iteration was cut to.
            longer = replace(self._limits, batches=self._limits.batches * _MORE_BATCHES)
            self._trials.use(longer)
            trial, traces = self._run(self._world_size, "several-longer")
        if trial.interrupted_by is not None or not _have_steps(traces):
            return self._unverified(trial, traces)
        if any(trace.is_exact for trace in traces):
            return self._exact(trial, traces)
        return self._compared(trial, traces)

    def _run(
        self, world_size: int, name: str, feed: Path | None = None
    ) -> tuple[Trial, list[RawTrace]]:
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        self._say(f"running on {ranks}")
        trial = self._trials.run(world_size, name, feed)
        return trial, [read_trace(trial.folder, rank) for rank in range(world_size)]

    def _unverified(self, trial: Trial, traces: list[RawTrace]) -> Verdict:
        sizes = (1, self._world_size)
        if trial.failure:
            why = "The program did not come to a step of an optimizer on all ranks."
        elif any(trace.events[:-1] for trace in traces):
            why = "The program ended without a step of an optimizer of torch."
        else:
            why = "The program ended without a torch module, loader or optimizer on its ranks."
        remedy = "Verify a script that trains; what it printed is above." if trial.failure else ""
        findings = [unknown(check, why, remedy) for check in CAUSES_FIRST]
        return Verdict(sizes, tuple(findings), trouble_of(trial), trial.interrupted_by)

    def _exact(self, trial: Trial, traces: list[RawTrace]) -> Verdict:
        runs, trouble = [exact_run(traces)], trouble_of(trial)
        sizes = range(1, self._world_size)
        for world_size in reversed(sizes):
            trial, traces = self._run(world_size, f"on-{world_size}")
            trouble = trouble or trouble_of(trial)
            if trial.interrupted_by is not None:
                return Verdict((*sizes, self._world_size), (), trouble, trial.interrupted_by)
            runs.insert(0, exact_run(traces))
        findings = in_order(check_exact(runs))
        return Verdict((*sizes, self._world_size), tuple(findings), trouble, is_exact=True)

    def _compared(self, trial: Trial, traces: list[RawTrace]) -> Verdict:
        alone, trace = self._run_one(traces, "one")
        if not alone.failure and (passes := _passes_ratio(traces, trace)) == self._world_size:
            # It accumulates N times as many passes on one rank, so that each is as large.
            self._say(f"running on 1 rank again, with {passes} times the passes")
            alone, trace = self._run_one(traces, "one-accumulating", one_by_one=True)
        if alone.interrupted_by is not None:
            return Verdict((1, self._world_size), (), trouble_of(alone), alone.interrupted_by)
        trouble = trouble_of(trial) or trouble_of(alone)
        return Verdict((1, self._world_size), tuple(judge(traces, trace)), trouble)

    def _run_one(
        self, traces: list[RawTrace], name: str, *, one_by_one: bool = False
    ) -> tuple[Trial, RawTrace]:
        feed = self._trials.folder / f"{name}.json"
        feed.write_text(json.dumps(feed_of(traces, one_by_one=one_by_one)))
        trial, (trace,) = self._run(1, name, feed)
        return trial, trace


def judge(traces: list[RawTrace], one: RawTrace) -> list[Finding]:
    """Ask all checks about a run on several ranks and one on one."""
    identities = Identities([*traces, one])
    ranks = tuple(resolve(trace, identities) for trace in traces)
    seen = TwoRuns(ranks, resolve(one, identities))
    findings = [
        *check_samples(seen),
        *check_gradients(seen),
        *check_states(seen),
        *check_evaluations(seen),
    ]
    return in_order(with_means_of_evaluations(findings, seen))


def _have_steps(traces: list[RawTrace]) -> bool:
    wanted = ("step", "exact-step")
    return all(any(event["t"] in wanted for event in trace.events) for trace in traces)


def _passes_ratio(traces: list[RawTrace], one: RawTrace) -> float:
    """Compare how many backward passes a step has."""
    per_step = [_passes_of_first_step(trace) for trace in (one, traces[0])]
    return per_step[0] / per_step[1] if all(per_step) else 1.0


def _passes_of_first_step(trace: RawTrace) -> int:
    num_passes = 0
    for event in trace.events:
        if event["t"] == "step":
            return num_passes
        num_passes += event["t"] == "backward"
    return 0


def trouble_of(trial: Trial) -> str:
    """Say on how many ranks a run did not end well, and why; empty if it did."""
    if not trial.failure:
        return ""
    ranks = "1 rank" if trial.world_size == 1 else f"{trial.world_size} ranks"
    return f"On {ranks}: {trial.failure}"
