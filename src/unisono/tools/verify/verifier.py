"""Verifies one program: runs it, reads what was recorded, applies all checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.runtime.notices import plural
from unisono.tools.verify.bit_checks import (
    KINDS,
    bits_of,
    check_exact,
    check_resumptions,
    check_states,
    compare,
)
from unisono.tools.verify.findings import CAUSES_FIRST, Finding, Verdict, in_order, unknown
from unisono.tools.verify.gradient_checks import check_gradients
from unisono.tools.verify.reading import Identities, hashes_of, resolve
from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.sample_checks import (
    check_evaluations,
    check_samples,
    with_means_of_evaluations,
    with_numbers_of_steps,
)
from unisono.tools.verify.trace import Iteration, LoaderFacts, OptimizerStep, RankTrace, TwoRuns
from unisono.tools.verify.trials import Program, Trial, Trials, trials_of

_CHECKS = (check_samples, check_gradients, check_states, check_evaluations)
_MORE_BATCHES, _ALL_BATCHES = 8, 10**9
_STOPS = (0.25, 0.5, 0.75)
"""Where a run is stopped, as fractions of the undisturbed one."""


def verify(
    program: Program,
    world_size: int,
    limits: Limits,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    resumes: bool = False,
) -> Verdict:
    """Run a program several times, and compare the runs.

    It runs on `world_size` ranks and on one; with Unisono, on every number up to that. If it
    `resumes`, it runs on `world_size` ranks only, undisturbed and stopped.
    """
    if resumes:
        limits = replace(limits, batches=_ALL_BATCHES, full_steps=0, replays=True)
    with trials_of(program, limits, environ) as trials:
        if resumes:
            return _resumed(trials, world_size, say)
        return _compared(trials, world_size, say)


def _compared(trials: Trials, world_size: int, say: Callable[[str], None]) -> Verdict:
    say(f"running on {plural(world_size, 'rank')}")
    trial = trials.run(world_size, "several")
    if not trial.failure and not _has_steps(trial):
        # The program accumulates more passes than an iteration was cut to.
        trials.limits = replace(trials.limits, batches=trials.limits.batches * _MORE_BATCHES)
        trial = trials.run(world_size, "several-longer")
    if trial.interrupted_by is not None or not _has_steps(trial):
        why = "The program did not come to a step of an optimizer of torch on all ranks."
        return _unverified(trial, why, CAUSES_FIRST, (1, world_size))
    if any(trace.notes("unisono") for trace in trial.traces):
        return _exact(trials, trial, say)
    say("running on 1 rank")
    alone = _run_one(trials, trial, "one")
    num_passes = [_passes_of_first_step(one.traces[0]) for one in (alone, trial)]
    if not alone.failure and num_passes[0] == world_size * num_passes[1] > 0:
        # One rank accumulates N times as many passes, so that each pass is equally large.
        say(f"running on 1 rank again, with {world_size} times the passes")
        alone = _run_one(trials, trial, "one-accumulating", one_by_one=True)
    if alone.interrupted_by is not None:
        return Verdict((1, world_size), (), alone.trouble, alone.interrupted_by)
    findings = judge(trial.traces, alone.traces[0])
    return Verdict((1, world_size), findings, trial.trouble or alone.trouble)


def _unverified(trial: Trial, why: str, checks: Iterable[str], sizes: tuple[int, ...]) -> Verdict:
    findings = [unknown(check, why) for check in checks]
    return Verdict(sizes, findings, trial.trouble, trial.interrupted_by)


def _exact(trials: Trials, trial: Trial, say: Callable[[str], None]) -> Verdict:
    """Compare the bits of runs on all numbers of workers up to that of the first run."""
    most, trouble = len(trial.traces), trial.trouble
    sizes, runs = tuple(range(1, most + 1)), {most: bits_of(trial.traces)}
    told = next((line for trace in trial.traces for line in trace.notes("loss")), "")
    for world_size in reversed(sizes[:-1]):
        say(f"running on {plural(world_size, 'rank')}")
        trial = trials.run(world_size, f"on-{world_size}")
        trouble = trouble or trial.trouble
        if trial.interrupted_by is not None:
            return Verdict(sizes, (), trouble, trial.interrupted_by)
        runs = {world_size: bits_of(trial.traces), **runs}
    return Verdict(sizes, in_order(check_exact(runs, told)), trouble, is_exact=True)


def _run_one(trials: Trials, trial: Trial, name: str, *, one_by_one: bool = False) -> Trial:
    feed = trials.folder / f"{name}.json"
    feed.write_text(json.dumps(feed_of(trial.traces, one_by_one=one_by_one)))
    return trials.run(1, name, feed)


def _resumed(trials: Trials, world_size: int, say: Callable[[str], None]) -> Verdict:
    say("running undisturbed")
    trial = trials.run(world_size, "undisturbed")
    undisturbed, limits = bits_of(trial.traces), trials.limits
    num_steps = min(trace.num_steps for trace in trial.traces)
    if trial.failure or num_steps < 2:
        why = "The program took fewer than two steps of an optimizer."
        return _unverified(trial, why, KINDS, (world_size,))
    resumptions = []
    for stop in sorted({max(1, round(num_steps * part)) for part in _STOPS}):
        say(f"stopping after {stop} steps, and resuming")
        files = trials.folder / f"stopped-{stop}-files"
        trials.limits = replace(limits, steps=stop)
        trial = trials.run(world_size, f"stopped-{stop}", files=files)
        trials.limits = limits
        if not trial.failure:
            trial = trials.run(world_size, f"stopped-{stop}-resumed", files=files)
        if trial.failure:
            why = f"Stopped after {stop} steps, it did not run again."
            return _unverified(trial, why, KINDS, (world_size,))
        resumptions.append(compare(undisturbed, bits_of(trial.traces), stop))
    findings = in_order(check_resumptions(resumptions), tuple(KINDS))
    return Verdict((world_size,), findings, is_exact=True)


def judge(traces: Sequence[RankTrace], one: RankTrace) -> tuple[Finding, ...]:
    """Apply all checks to the ranks of one run, and a run on one rank."""
    *ranks, of_one = resolve([*traces, one])
    seen = TwoRuns(ranks, of_one)
    findings = [finding for check in _CHECKS for finding in check(seen)]
    findings = with_means_of_evaluations(findings, seen)
    return in_order(with_numbers_of_steps(findings, seen))


def _has_steps(trial: Trial) -> bool:
    return all(trace.num_steps for trace in trial.traces)


def _passes_of_first_step(trace: RankTrace) -> int:
    return next((step.backwards[1] for step in trace.of(OptimizerStep)), 0)


def feed_of(traces: Sequence[RankTrace], *, one_by_one: bool = False) -> dict[str, Any]:
    """Return the samples of each iteration, as batches of ``[index, content]``.

    ``epochs`` are by ``"loader/iteration"``, ``lengths`` of the loaders' datasets (-1: an index is
    another sample on each rank) and global ``batch_sizes`` by loader. With `one_by_one` the batches
    of ranks follow each other, for a program that accumulates more passes on fewer ranks.
    """
    identities, epochs, factors = Identities(traces), {}, {}
    plans: dict[tuple[int, int], list[Any]] = {}
    for trace in traces:
        for iteration in trace.of(Iteration):
            plans.setdefault(iteration.place, []).append(_batches(trace, iteration))
    for (loader, epoch), of_ranks in sorted(plans.items()):
        if None not in of_ranks:
            epochs[f"{loader}/{epoch}"], factors[loader] = _together(of_ranks, one_by_one)
    lengths = {
        str(loader.number): loader.length if identities.are_shared(loader.dataset) else -1
        for loader in traces[0].of(LoaderFacts)
    }
    return {"epochs": epochs, "lengths": lengths, "batch_sizes": _batch_sizes(traces, factors)}


def _batches(trace: RankTrace, iteration: Iteration) -> list[list[list[Any]]] | None:
    if iteration.indices is None:
        return None
    hashes = hashes_of(trace).get(iteration.dataset, ())
    return [[[at, hashes[at] if at < len(hashes) else ""] for at in b] for b in iteration.kept]


def _together(plans: list[Any], one_by_one: bool) -> tuple[list[Any], int]:
    """Combine the batches of ranks, equal ones once; return them, and how many make one."""
    if all(plan == plans[0] for plan in plans):
        return plans[0], 1
    rows = [[plan[at] for plan in plans if at < len(plan)] for at in range(max(map(len, plans)))]
    if one_by_one:
        return [batch for row in rows for batch in row], 1
    return [[item for batch in row for item in batch] for row in rows], len(plans)


def _batch_sizes(traces: Sequence[RankTrace], factors: dict[int, int]) -> dict[str, int]:
    """Return global batch sizes; a loader that is not iterated over takes its dataset's factor."""
    loaders = traces[0].of(LoaderFacts)
    of_dataset = {one.dataset: factors[one.number] for one in loaders if one.number in factors}
    sizes = {}
    for one in loaders:
        factor = factors.get(one.number, of_dataset.get(one.dataset, len(traces)))
        size = one.batch_size
        if factor > 1:
            alike = [o for trace in traces for o in trace.of(LoaderFacts) if o.number == one.number]
            size = sum(o.batch_size or 0 for o in alike)
        if size:
            sizes[str(one.number)] = size
    return sizes
