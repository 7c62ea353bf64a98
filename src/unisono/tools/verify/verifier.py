"""Verifies one program: runs it, reads what was recorded, asks all checks.

*On several ranks and on one*, which reads what the ranks of the run before read together, or, with
Unisono, on every number of workers. *After a stop*: it is stopped at several steps, started again,
and compared with an undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.runtime.notices import plural
from unisono.tools.verify.bit_checks import (
    KINDS,
    Bits,
    Resumption,
    bits_of,
    check_exact,
    check_resumptions,
    check_states,
    compare,
)
from unisono.tools.verify.findings import CAUSES_FIRST, Finding, Verdict, in_order, unknown
from unisono.tools.verify.gradient_checks import check_gradients
from unisono.tools.verify.reading import Identities, RawTrace, resolve
from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.sample_checks import (
    check_evaluations,
    check_samples,
    with_means_of_evaluations,
)
from unisono.tools.verify.trace import TwoRuns
from unisono.tools.verify.trials import Program, Trial, Trials, trials_of

_CHECKS = (check_samples, check_gradients, check_states, check_evaluations)
_MORE_BATCHES, _ALL_BATCHES = 8, 10**9
_STOPS = (0.25, 0.5, 0.75)
"""Where a run is stopped, in parts of the undisturbed one."""


def verify(
    program: Program,
    world_size: int,
    limits: Limits,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    resumes: bool = False,
) -> Verdict:
    """Run a program several times, and compare.

    Args:
        world_size: on how many ranks, at least 2, and then on one. One that trains with Unisono
            runs on every number up to it.
        resumes: whether to run it on `world_size` ranks alone, stop it, and compare how it
            resumes by itself with an undisturbed run, bit for bit.
    """
    if resumes:
        limits = replace(limits, batches=_ALL_BATCHES, full_steps=0, replays=True)
    with trials_of(program, limits, environ) as trials:
        verifier = _Verifier(trials, world_size, limits, say)
        return verifier.resumed() if resumes else verifier.compared()


@dataclass(frozen=True)
class _Verifier:
    _trials: Trials
    _world_size: int
    _limits: Limits
    _say: Callable[[str], None]

    def compared(self) -> Verdict:
        """Run the program on several ranks and on one, and judge."""
        trial = self._run(self._world_size, "several")
        if not trial.failure and not _has_steps(trial):
            # It accumulates more passes than an iteration was cut to.
            longer = replace(self._limits, batches=self._limits.batches * _MORE_BATCHES)
            self._trials.limits = longer
            trial = self._run(self._world_size, "several-longer")
        if trial.interrupted_by is not None or not _has_steps(trial):
            why = "The program did not come to a step of an optimizer of torch on all ranks."
            return self._unverified(trial, why, CAUSES_FIRST, (1, self._world_size))
        if any(trace.of("exact") for trace in trial.traces):
            return self._exact(trial)
        return self._with_one(trial)

    def _run(self, world_size: int, name: str, feed: Path | None = None) -> Trial:
        self._say(f"running on {plural(world_size, 'rank')}")
        return self._trials.run(world_size, name, feed)

    def _unverified(
        self, trial: Trial, why: str, checks: Iterable[str], sizes: tuple[int, ...]
    ) -> Verdict:
        findings = [unknown(check, why) for check in checks]
        return Verdict(sizes, findings, trial.trouble, trial.interrupted_by)

    def _exact(self, trial: Trial) -> Verdict:
        """Compare the bits of runs on all numbers of workers up to that of the first run."""
        sizes, trouble = tuple(range(1, self._world_size + 1)), trial.trouble
        runs = {self._world_size: bits_of(trial.traces)}
        for world_size in reversed(sizes[:-1]):
            trial = self._run(world_size, f"on-{world_size}")
            trouble = trouble or trial.trouble
            if trial.interrupted_by is not None:
                return Verdict(sizes, (), trouble, trial.interrupted_by)
            runs = {world_size: bits_of(trial.traces), **runs}
        return Verdict(sizes, in_order(check_exact(runs)), trouble, is_exact=True)

    def _with_one(self, trial: Trial) -> Verdict:
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

    def resumed(self) -> Verdict:
        """Run the program, stop it, resume and compare."""
        self._say("running undisturbed")
        trial = self._trials.run(self._world_size, "undisturbed")
        undisturbed = bits_of(trial.traces)
        num_steps = min(len(trace.of("step-bits")) for trace in trial.traces)
        sizes = (self._world_size,)
        if trial.failure or num_steps < 2:
            why = "The program took fewer than two steps of an optimizer."
            return self._unverified(trial, why, KINDS, sizes)
        stops = sorted({max(1, round(num_steps * part)) for part in _STOPS})
        resumptions = []
        for stop in stops:
            self._say(f"stopping after {stop} steps, and resuming")
            trial, found = self._resume(undisturbed, stop)
            if trial.failure:
                why = f"Stopped after {stop} steps, it did not run again."
                return self._unverified(trial, why, KINDS, sizes)
            resumptions.append(found)
        findings = in_order(check_resumptions(resumptions), tuple(KINDS))
        return Verdict(sizes, findings, is_exact=True)

    def _resume(self, undisturbed: Bits, stop: int) -> tuple[Trial, Resumption]:
        name = f"stopped-{stop}"
        files = self._trials.folder / f"{name}-files"
        self._trials.limits = replace(self._limits, steps=stop)
        trial = self._trials.run(self._world_size, name, files=files)
        self._trials.limits = self._limits
        if not trial.failure:
            trial = self._trials.run(self._world_size, f"{name}-resumed", files=files)
        return trial, compare(undisturbed, bits_of(trial.traces), stop)


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


_NOT_SHARED = -1


def feed_of(traces: Sequence[RawTrace], *, one_by_one: bool = False) -> dict[str, Any]:
    """Return the samples of each iteration, as batches of ``[index, content]``.

    Args:
        traces: of all ranks.
        one_by_one: give the ranks' batches one after the other, to a program that accumulates
            more passes on fewer ranks, instead of putting them together.

    Returns:
        ``epochs`` by ``"loader/iteration"``, ``lengths`` of the loaders' datasets (-1: an index
        means another sample on each rank), and global ``batch_sizes``, by loader.
    """
    identities = Identities(traces)
    epochs, factors, lengths = {}, {}, {}
    for place in sorted({place for trace in traces for place in trace.epochs}):
        plans = [_batches(trace, place) for trace in traces if place in trace.epochs]
        known = [plan for plan in plans if plan is not None]
        if len(known) == len(plans):
            loader, epoch = place
            epochs[f"{loader}/{epoch}"], factors[loader] = _together(known, one_by_one)
    for number, facts in traces[0].loaders.items():
        is_shared = identities.are_shared(facts["dataset"])
        lengths[str(number)] = facts["base_length"] if is_shared else _NOT_SHARED
    sizes = _batch_sizes(traces, factors)
    return {"epochs": epochs, "lengths": lengths, "batch_sizes": sizes}


def _batches(trace: RawTrace, place: tuple[int, int]) -> list[list[list[Any]]] | None:
    kept = trace.epochs[place].get("kept")
    if kept is None:
        return None
    contents = trace.contents.get(trace.loaders[place[0]]["dataset"], {})
    return [[[index, contents.get(index, "")] for index in batch] for batch in kept]


def _together(plans: list[Any], one_by_one: bool) -> tuple[list[Any], int]:
    """Put the batches of ranks together, and say how many make one.

    Ranks that read the same read it once.
    """
    if all(plan == plans[0] for plan in plans):
        return plans[0], 1
    rows = [[plan[at] for plan in plans if at < len(plan)] for at in range(max(map(len, plans)))]
    if one_by_one:
        return [batch for row in rows for batch in row], 1
    return [[item for batch in row for item in batch] for row in rows], len(plans)


def _batch_sizes(traces: Sequence[RawTrace], factors: dict[int, int]) -> dict[str, int]:
    """Work out global batch sizes; a loader that nobody iterates over goes with its dataset's."""
    loaders = traces[0].loaders
    of_dataset = {loaders[k]["dataset"]: factor for k, factor in factors.items() if k in loaders}
    sizes = {}
    for number, facts in loaders.items():
        factor = factors.get(number, of_dataset.get(facts["dataset"], len(traces)))
        size = facts["batch_size"]
        if factor > 1:
            size = sum(t.loaders[number]["batch_size"] or 0 for t in traces if number in t.loaders)
        if size:
            sizes[str(number)] = size
    return sizes
