"""Does a run have the bits of another one, and are ranks replicas of each other? Pure.

*On 1, 2, … workers*, if a program trains with Unisono: the first difference is named. Within a step
the order is that of causes: the samples of a shard, its gradients, then buffers and parameters
after the update.

*After a stop*: the resumed run begins where its first parameters are those of the undisturbed run;
every step from there on must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from unisono.tools.verify.digests import Array, distance, joined
from unisono.tools.verify.findings import (
    CAUSES_FIRST,
    Finding,
    around_mistake,
    ok,
    other_end,
    unknown,
    wrong,
)
from unisono.tools.verify.trace import Bits, ModelState, OptimizerStep, RankTrace, TwoRuns

Digests = Mapping[str, str]
BitsOfRun = dict[tuple[int, str, int], Digests]
"""The computations of a run: digests by step (from 0), kind, and shard or rank."""

KINDS = {
    "resume-samples": "Save where the epoch stands, and skip what has been read: the sampler's "
    "epoch and the batch in it.",
    "resume-parameters": "Save the model's `state_dict()` and load it before the first step.",
    "resume-optimizer": "Save and load the optimizer's `state_dict()`, and the schedule's.",
    "resume-generators": "Save and load the states of torch's, numpy's and Python's generators.",
}
_RESUMED = {
    **{check.removeprefix("resume-"): check for check in KINDS},
    "inputs": "resume-samples",  # of a model without samples by shard
}
_OF_SHARDS = {
    "samples": (
        "samples-lost",
        "on {workers} workers it has other samples than on one: what the dataset returns depends "
        "on the worker.",
        "Let a sample depend on its index and on the default generators alone: not on "
        "RANK, the time, the process, or its own generator.",
    ),
    "gradients": (
        "gradients-not-averaged",
        "the gradient of `{name}` on {workers} workers differs from that on one, from the same "
        "samples, parameters and buffers.",
        "Look in the forward pass and the loss for what differs between workers: "
        "attributes that change from call to call, your own generators, RANK.",
    ),
}
_OF_LOSSES = "mean-of-means"
_OF_TRAINING = tuple(check for check in CAUSES_FIRST if not check.startswith("evaluation-"))
_OF_WORKERS = {"buffers": "buffers-differ", "parameters": "parameters-differ"}
_WRITTEN = (
    "Nothing but the optimizer may write to parameters, and nothing but the forward pass to "
    "buffers: look for code that does so depending on RANK."
)


def bits_of(traces: Sequence[RankTrace]) -> BitsOfRun:
    """Return what the ranks of a run recorded; each shard was computed by one of them.

    ``"end"`` is a kind, too: of ranks that were not stopped.
    """
    each = (bits for trace in traces for bits in trace.of(Bits))
    ends: BitsOfRun = {(0, "end", trace.rank): {} for trace in traces if trace.how == "ended"}
    return {(bits.step, bits.kind, bits.place): bits.digests for bits in each} | ends


def _differing(ours: Digests, theirs: Digests) -> str:
    """Return the first name whose digest differs there; empty if there is none."""
    return next((name for name in ours if theirs.get(name) != ours[name]), "")


def check_exact(runs: Mapping[int, BitsOfRun], about_loss: str = "") -> list[Finding]:
    """Compare runs, by their numbers of workers, ascending, with the first, on one worker.

    `about_loss`: what a run has said of a loss that depends on the number of shards.
    """
    base, *_ = runs.values()
    of_runs = ({at for at, kind, _ in run if kind == "parameters"} for run in runs.values())
    steps = sorted(set.intersection(*of_runs))
    if not steps:
        return [unknown(check, "The runs have no step in common.") for check in _OF_TRAINING]
    for step in steps:
        for num_workers, run in list(runs.items())[1:]:
            for found in _differences(base, run, step, num_workers):
                return around_mistake(found, _OF_TRAINING)
    for num_workers, run in runs.items():
        if _is_shorter(run, base) or _is_shorter(base, run):
            found = other_end(num_workers, _length(run)[0], _length(base)[0])
            return around_mistake(found, _OF_TRAINING, were_well=True)
    num_shards = len({place for _, kind, place in base if kind == "gradients"})
    told = (
        f"Samples and gradients of {num_shards} shards, parameters and buffers have the same bits "
        f"on {', '.join(map(str, runs))} workers in {len(steps)} steps."
    )
    same = {check: ok(check, told) for check in _OF_TRAINING}
    if about_loss:
        same[_OF_LOSSES] = ok(_OF_LOSSES, f"{told} But {about_loss}.")
    return list(same.values())


def _differences(base: BitsOfRun, run: BitsOfRun, step: int, num_workers: int) -> Iterator[Finding]:
    for kind, (check, told, remedy) in _OF_SHARDS.items():
        for shard in sorted(place for at, of, place in base if (at, of) == (step, kind)):
            place = step, kind, shard
            if name := _differing(base[place], run.get(place, {})):
                told = told.format(name=name, workers=num_workers)
                yield wrong(check, f"Step {step}, shard {shard}: {told}", remedy)
    for kind, check in _OF_WORKERS.items():
        for rank in range(num_workers):
            theirs = run.get((step, kind, rank))
            if theirs is not None and (name := _differing(base[step, kind, 0], theirs)):
                told = (
                    f"Step {step}: after the update worker {rank} of {num_workers} has other "
                    f"{kind} than one worker; the first is `{name}`."
                )
                yield wrong(check, told, _WRITTEN)


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run that was stopped and started again."""

    stopped_after: int  # number of steps
    first: int | None = None  # the step of the undisturbed run it began with
    # the first difference of each kind, in words
    differences: Mapping[str, str] = field(default_factory=dict)
    num_compared: int = 0  # number of steps


def compare(undisturbed: BitsOfRun, resumed: BitsOfRun, stopped_after: int) -> Resumption:
    """Compare a resumed run with the undisturbed one."""
    begun = resumed.get((0, "before", 0))
    if begun is None:
        return Resumption(stopped_after)
    possible = [
        _compare_from(first, undisturbed, resumed, stopped_after)
        for first in reversed(range(stopped_after + 1))
        if undisturbed.get((first, "before", 0)) == begun
    ]
    told = "it begins with parameters that the undisturbed run never had"
    unknown_first = Resumption(stopped_after, None, {"resume-parameters": told})
    # Several steps may begin with the same parameters, for example if a learning rate is 0.
    return min(possible, key=lambda one: len(one.differences), default=unknown_first)


def _compare_from(
    first: int, undisturbed: BitsOfRun, resumed: BitsOfRun, stopped_after: int
) -> Resumption:
    differences: dict[str, str] = {}
    compared = set()
    for (at, kind, place), theirs in sorted(resumed.items(), key=lambda item: item[0]):
        ours, check = undisturbed.get((first + at, kind, place)), _RESUMED.get(kind)
        if ours is not None and check is not None:
            compared.add(at)
            if name := _differing(ours, theirs):
                where = f"step {first + at}, {'shard' if kind == 'samples' else 'rank'} {place}"
                differences.setdefault(check, f"{where}: `{name}` has other bits")
    if _is_shorter(resumed, undisturbed, first) or _is_shorter(undisturbed, resumed, -first):
        num_steps = first + _length(resumed)[0], _length(undisturbed)[0]
        told = "it took {} steps in all, and the undisturbed run {}".format(*num_steps)
        differences.setdefault("resume-samples", told)
    return Resumption(stopped_after, first, differences, len(compared))


def _is_shorter(run: BitsOfRun, other: BitsOfRun, begun_at: int = 0) -> bool:
    """Return whether a run has ended, unlike another one, which took more steps."""
    num_steps, has_ended = _length(run)
    return has_ended and begun_at + num_steps < _length(other)[0]


def _length(run: BitsOfRun) -> tuple[int, bool]:
    """Return how many steps a run took, and whether it ended then."""
    kinds = {(at, kind) for at, kind, _ in run}
    return sum(kind == "parameters" for _, kind in kinds), (0, "end") in kinds


def check_resumptions(resumptions: Sequence[Resumption]) -> list[Finding]:
    """Return findings on all stops."""
    if not any(r.first or r.differences for r in resumptions):
        why = "After each stop the program began again from its first step: nothing was resumed."
        remedy = "Verify a program that saves checkpoints and resumes; `--steps` runs it longer."
        return [unknown(check, why, remedy) for check in KINDS]
    return [_judge(check, resumptions, remedy) for check, remedy in KINDS.items()]


def _judge(check: str, resumptions: Sequence[Resumption], remedy: str) -> Finding:
    for one in resumptions:
        if check in one.differences:
            told = f"Stopped after {one.stopped_after} steps and resumed: {one.differences[check]}."
            return wrong(check, told, remedy)
    resumed = [one for one in resumptions if one.num_compared]
    if not resumed or any(one.first is None for one in resumptions):
        return unknown(check, "The resumed run took no step that could be compared.")
    stops = ", ".join(str(one.stopped_after) for one in resumed)
    firsts = ", ".join(str(one.first) for one in resumed)
    told = f"Stopped after {stops} steps, resumed at step {firsts}: the same bits from there on."
    return ok(check, told)


_APART_AT_MOST = 0.05
_FASTEST, _BETWEEN = 16, 0.02
_RELATIVE, _RELATIVE_IN_TIME = 1e-6, 1e-3


def check_states(seen: TwoRuns) -> list[Finding]:
    """Return findings on parameters, buffers, learning rates and generators."""
    return [
        *_learning_rates(seen),
        _replicas(seen, "parameters"),
        _replicas(seen, "buffers"),
        _randomness(seen),
    ]


def _states(seen: TwoRuns) -> list[tuple[OptimizerStep, list[ModelState]]]:
    """Return the steps before which the states of all ranks are known."""
    states = [(step[0], [r.state for r in step if r.state is not None]) for step in seen.steps()]
    return [(step, of_ranks) for step, of_ranks in states if len(of_ranks) == seen.world_size]


def _replicas(seen: TwoRuns, kind: str) -> Finding:
    """Check that all ranks have the same parameters, or buffers, when a step begins."""
    check, states = f"{kind}-differ", _states(seen)
    if not states:
        return unknown(check, "No forward pass of a whole model was seen on all ranks.")
    for step, of_ranks in states:
        first, *others = (getattr(state, kind) for state in of_ranks)
        if name := next(filter(None, (_differing(first, {**first, **o}) for o in others)), ""):
            when = f"before step {step.number}" if step.number else "before the first step"
            return wrong(check, f"Ranks have different {kind} {when}; the first is `{name}`.")
    same = f"The same bits on all ranks before each of {len(states)} steps."
    return ok(check, same) if kind == "buffers" else _against_one(seen, check, same)


def _against_one(seen: TwoRuns, check: str, same: str) -> Finding:
    """Compare the final parameters of one rank with those of all ranks."""
    pairs = [(s[0], seen.step_of_one(s[0])) for s in seen.steps() if s[0].optimizer == 0]
    known = [(a.parameters, b.parameters) for a, b in pairs if b and a.parameters and b.parameters]
    if not known:
        return unknown(check, f"{same} With one rank they could not be compared.")
    start, (mine, ones) = known[0][0], known[-1]
    names = [name for name in mine if name in ones and name in start]
    x, y, before = (joined(one[name] for name in names) for one in (mine, ones, start))
    if len(x) != len(y):
        return unknown(check, f"{same} One rank has others.")
    moved = max(distance(x, before), 1e-3 * float(np.linalg.norm(x)))
    apart = distance(x, y) / moved if moved else 0.0
    told = f"{same} After {len(known)} steps they are {apart:.1e} of the way apart from one rank's"
    if apart <= _APART_AT_MOST:
        return ok(check, f"{told}, which is rounding.")
    return unknown(check, f"{told}; why is not known, or said by another check.")


def _learning_rates(seen: TwoRuns) -> list[Finding]:
    """Find a factor on all learning rates, or a schedule that runs faster than one rank's."""
    scaled, fast = "learning-rate-scaled", "schedule-too-fast"
    alike = [(step[0], seen.step_of_one(step[0])) for step in seen.steps()]
    num_groups = len(alike[0][0].lr) if alike else 0
    pairs = [(a, b) for a, b in alike if b is not None and len(a.lr) == len(b.lr) == num_groups]
    mine = np.array([step.lr for step, _ in pairs if step.optimizer == 0])
    ones = np.array([one.lr for _, one in pairs if one.optimizer == 0])
    if not len(mine):
        why = "The run on one rank took no step."
        return [unknown(scaled, why), unknown(fast, why)]
    if np.allclose(mine, ones, rtol=_RELATIVE, atol=0):
        told = f"The learning rates of {len(mine)} steps are those of one rank."
        return [ok(scaled, told), ok(fast, told)]
    ticks_more = any(step.ticks > max(1, one.ticks) for step, one in pairs[1:])
    if ticks_more and ones[0, 0] < ones[-1, 0] and mine[0, 0] < mine[-1, 0]:
        told = (
            "The schedule takes several of its steps at once while it warms up, as Accelerate does "
            "for schedules that are counted in batches of one rank."
        )
        return [unknown(scaled, told), unknown(fast, told)]
    ratios = mine[ones != 0] / ones[ones != 0]
    if len(ratios) > 1 and np.ptp(ratios) <= 1e-3 * abs(ratios[0]):
        told = (
            f"All ranks have {ratios[0]:.6g} times the learning rate of one rank "
            f"({mine[0, 0]:.6g} and {ones[0, 0]:.6g} in step 0), on the same global batch."
        )
        return [wrong(scaled, told), ok(fast, "The learning rate keeps its ratio.")]
    if np.allclose(mine[0], ones[0], rtol=_RELATIVE, atol=0):
        start = ok(scaled, "The first learning rate is that of one rank.")
    else:
        start = unknown(scaled, "Learning rates differ, but not by one factor.")
    return [start, _too_fast(fast, mine, ones)]


def _too_fast(check: str, mine: Array, ones: Array) -> Finding:
    """Return how many of one rank's steps the schedule takes in each step."""
    at = int(np.argmin(np.isclose(mine, ones, rtol=_RELATIVE, atol=0).all(axis=1)))
    told = (
        f"In step {at} the learning rate is {mine[at, 0]:.6g}, that of one rank {ones[at, 0]:.6g}"
    )
    if (speed := _speed(mine, ones)) is None:
        return unknown(check, f"{told}; the schedules are different ones.")
    return wrong(check, f"{told}: the schedule runs {speed:g} times as fast.")


def _speed(mine: Array, ones: Array) -> float | None:
    """Return k such that step t here has the learning rates of step k·t there, or None.

    An integer k is found for any schedule, others only if rates change from step to step.
    """
    steps, spreads = np.arange(len(ones)), np.ptp(ones, axis=0)
    best, least = None, _BETWEEN
    for hundredths in range(105, 100 * _FASTEST + 1):
        speed, is_whole = hundredths / 100, hundredths % 100 == 0
        places = speed * np.arange(len(mine))
        places = places[places <= len(ones) - 1]
        if len(places) < (2 if is_whole else 4):
            continue
        here = mine[: len(places)]
        there = np.stack([np.interp(places, steps, lr) for lr in ones.T], axis=1)
        if is_whole and np.allclose(here, there, rtol=_RELATIVE_IN_TIME):
            return speed
        apart = float(np.max(np.abs(here - there) / np.where(spreads > 0, spreads, 1)))
        if len(places) >= 4 and apart <= least:
            best, least = speed, apart
    return best


def _randomness(seen: TwoRuns) -> Finding:
    check = "randomness-same-on-all-ranks"
    draws = [step[0].place for step in seen.steps() if all(rank.draws for rank in step)]
    states = [of_ranks for step, of_ranks in _states(seen) if step.place in draws]
    if not states:
        return ok(check, "Forward passes draw no random numbers.")
    num_same = sum(len({state.rng for state in of_ranks}) == 1 for of_ranks in states)
    if num_same:
        told = f"In {num_same} of {len(states)} steps all ranks draw the same random numbers in the"
        where = "forward pass: the n-th sample of each rank gets the same dropout mask."
        return wrong(check, f"{told} {where}")
    return ok(check, f"Ranks drew different random numbers in {len(states)} steps.")
