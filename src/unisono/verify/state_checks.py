"""Are ranks replicas of each other, with learning rates and random numbers of their own? Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unisono.verify.findings import Finding, ok, unknown, wrong
from unisono.verify.linear import Array, joined
from unisono.verify.rank_trace import ModelState, OptimizerStep, TwoRuns

_APART_AT_MOST = 0.05
_FASTEST, _PLACES_AT_LEAST, _BETWEEN = 16, 4, 0.02
_RELATIVE, _RELATIVE_IN_TIME = 1e-6, 1e-3


def check_states(seen: TwoRuns) -> list[Finding]:
    """Judge parameters, buffers, learning rates and generators."""
    return [
        *_learning_rates(seen),
        _parameters(seen),
        _buffers(seen),
        _randomness(seen),
        _loader_randomness(seen),
    ]


def _states(seen: TwoRuns) -> list[tuple[OptimizerStep, list[ModelState]]]:
    """Give the steps before which the state of all ranks is known."""
    found = []
    for step in seen.steps():
        states = [rank.state for rank in step if rank.state is not None]
        if len(states) == seen.world_size:
            found.append((step[0], states))
    return found


def _first_difference(named: Sequence[Mapping[str, str]]) -> str:
    """Name what differs first, of what all have."""
    for name in named[0]:
        digests = {of_rank[name] for of_rank in named if name in of_rank}
        if len(digests) > 1:
            return name
    return ""


def _parameters(seen: TwoRuns) -> Finding:
    check = "parameters-differ"
    states = _states(seen)
    for step, of_ranks in states:
        name = _first_difference([state.parameters for state in of_ranks])
        if name:
            when = "before the first step" if step.number == 0 else f"before step {step.number}"
            return wrong(
                check,
                f"Ranks have different parameters {when}; the first is `{name}`.",
                "Begin with the same weights: seed before the model is made, load or `broadcast` "
                "those of rank 0 (DDP does), and let only averaged gradients change them.",
            )
    if not states:
        return unknown(check, "No forward pass of a whole model was seen on all ranks.")
    return _against_one(seen, check, len(states))


def _against_one(seen: TwoRuns, check: str, num_states: int) -> Finding:
    """Compare where one rank has come with where all have."""
    same = f"The same bits on all ranks before each of {num_states} steps."
    pairs = [(s[0], seen.step_of_one(s[0])) for s in seen.steps() if s[0].optimizer == 0]
    known = [(a, b) for a, b in pairs if b is not None and a.parameters and b.parameters]
    if not known:
        return unknown(check, f"{same} With one rank they could not be compared.")
    mine, ones = known[-1]
    start = known[0][0].parameters
    names = [name for name in mine.parameters if name in ones.parameters and name in start]
    x, y, before = (
        joined([parameters[name][0] for name in names])
        for parameters in (mine.parameters, ones.parameters, start)
    )
    if len(x) != len(y):
        return unknown(check, f"{same} One rank has others.")
    moved = max(float(np.linalg.norm(x - before)), 1e-3 * float(np.linalg.norm(x)))
    apart = float(np.linalg.norm(x - y)) / moved if moved else 0.0
    told = f"{same} After step {mine.number} they are {apart:.1e} of the way apart from one rank's"
    if apart <= _APART_AT_MOST:
        return ok(check, f"{told}, which is rounding.")
    return unknown(check, f"{told}; why is not known, or said by another check.")


def _buffers(seen: TwoRuns) -> Finding:
    check = "buffers-differ"
    states = _states(seen)
    if not states:
        return unknown(check, "No forward pass of a whole model was seen on all ranks.")
    if not states[0][1][0].buffers:
        return ok(check, "The model has no buffers.")
    for step, of_ranks in states:
        name = _first_difference([state.buffers for state in of_ranks])
        if name:
            return wrong(
                check,
                f"Before step {step.number} ranks have different buffers; the first is `{name}`.",
                "Let DDP broadcast them (`broadcast_buffers=True`, its default), use "
                "`SyncBatchNorm`, or average them before you evaluate or save.",
            )
    return ok(check, f"The same bits on all ranks before each of {len(states)} steps.")


def _learning_rates(seen: TwoRuns) -> list[Finding]:
    scaled, fast = "learning-rate-scaled", "schedule-too-fast"
    pairs = [
        (step[0], one)
        for step in seen.steps()
        if (one := seen.step_of_one(step[0])) is not None and len(one.lr) == len(step[0].lr)
    ]
    mine = [step.lr for step, _ in pairs if step.optimizer == 0]
    ones = [one.lr for _, one in pairs if one.optimizer == 0]
    if not mine:
        why = "The run on one rank took no step."
        return [unknown(scaled, why), unknown(fast, why)]
    if all(_are_close(a, b) for a, b in zip(mine, ones, strict=True)):
        told = f"The learning rates of {len(mine)} steps are those of one rank."
        return [ok(scaled, told), ok(fast, told)]
    ratios = _ratios(mine, ones)
    if _ticks_more(pairs) and ones[0] < ones[-1] and mine[0] < mine[-1]:
        told = (
            "The schedule takes several of its steps at once while it warms up, as Accelerate does "
            "for schedules that are counted in batches of one rank."
        )
        return [unknown(scaled, told), unknown(fast, told)]
    if ratios and max(ratios) - min(ratios) <= 1e-3 * abs(ratios[0]) and len(ratios) > 1:
        told = (
            f"All ranks have {ratios[0]:.6g} times the learning rate of one rank "
            f"({mine[0][0]:.6g} and {ones[0][0]:.6g} in step 0), on the same global batch."
        )
        remedy = (
            "Choose the learning rate for the global batch, and leave it alone when the number of "
            "ranks changes; scale it only where the global batch grows with them."
        )
        return [wrong(scaled, told, remedy), ok(fast, "The learning rate keeps its ratio.")]
    first_equal = _are_close(mine[0], ones[0])
    start = (
        ok(scaled, "The first learning rate is that of one rank.")
        if first_equal
        else unknown(scaled, "Learning rates differ, but not by one factor.")
    )
    return [start, _too_fast(fast, mine, ones)]


def _ticks_more(pairs: Sequence[tuple[OptimizerStep, OptimizerStep]]) -> bool:
    """Tell whether a schedule steps more often here, between two steps, than on one rank."""
    return any(step.ticks > max(1, one.ticks) for step, one in pairs[1:])


def _too_fast(
    check: str, mine: Sequence[tuple[float, ...]], ones: Sequence[tuple[float, ...]]
) -> Finding:
    """Tell how many steps of one rank the schedule takes in each step here."""
    at = next(n for n, (a, b) in enumerate(zip(mine, ones, strict=True)) if not _are_close(a, b))
    told = (
        f"In step {at} the learning rate is {mine[at][0]:.6g}, that of one rank {ones[at][0]:.6g}"
    )
    remedy = (
        "Step the schedule once for each step of the optimizer, and count its length in steps of "
        "the global batch: `len(loader)` on a rank is that already."
    )
    speed = _speed(mine, ones)
    if speed is None:
        return unknown(check, f"{told}; the schedules are different ones.")
    return wrong(check, f"{told}: the schedule runs {speed} times as fast.", remedy)


def _speed(mine: Sequence[tuple[float, ...]], ones: Sequence[tuple[float, ...]]) -> float | None:
    """Find k so that step t here has the learning rate of step k·t there."""
    for speed in range(2, _FASTEST + 1):
        places = [at for at in range(len(mine)) if at * speed < len(ones)]
        pairs = [(mine[at], ones[at * speed]) for at in places]
        if len(places) > 1 and all(np.allclose(a, b, rtol=_RELATIVE_IN_TIME) for a, b in pairs):
            return speed
    return _speed_between(np.array([lr[0] for lr in mine]), np.array([lr[0] for lr in ones]))


def _speed_between(mine: Array, ones: Array) -> float | None:
    """Find one that is no whole number, for schedules that change in each step."""
    spread, steps = float(np.ptp(ones)), np.arange(len(ones))
    best: tuple[float, float] | None = None
    for speed in np.arange(1.05, _FASTEST, 0.01):
        places = [at for at in range(len(mine)) if at * speed <= len(ones) - 1]
        if len(places) < _PLACES_AT_LEAST:
            break
        there = np.interp(np.array(places) * speed, steps, ones)
        apart = float(np.max(np.abs(there - mine[places])))
        if best is None or apart < best[0]:
            best = apart, round(float(speed), 2)
    return best[1] if best is not None and best[0] <= _BETWEEN * spread else None


def _are_close(a: Sequence[float], b: Sequence[float]) -> bool:
    return bool(np.allclose(a, b, rtol=_RELATIVE, atol=0))


def _ratios(mine: Sequence[Sequence[float]], ones: Sequence[Sequence[float]]) -> list[float]:
    pairs = [p for a, b in zip(mine, ones, strict=True) for p in zip(a, b, strict=True)]
    return [a / b for a, b in pairs if b]


def _randomness(seen: TwoRuns) -> Finding:
    check = "randomness-same-on-all-ranks"
    states = [
        (step, [rank.state for rank in step if rank.state is not None])
        for step in seen.steps()
        if all(rank.draws for rank in step)
    ]
    states = [(step, of_ranks) for step, of_ranks in states if len(of_ranks) == seen.world_size]
    if not states:
        return ok(check, "Forward passes draw no random numbers.")
    same = [step[0].number for step, of in states if len({state.rng for state in of}) == 1]
    if same:
        return wrong(
            check,
            f"In {len(same)} of {len(states)} steps all ranks draw the same random numbers in the "
            f"forward pass: the n-th sample of each rank gets the same dropout mask.",
            "Seed each rank differently once the model is made: `torch.manual_seed(seed + rank)`.",
        )
    return ok(check, f"Ranks drew different random numbers in {len(states)} steps.")


def _loader_randomness(seen: TwoRuns) -> Finding:
    check = "loader-randomness-same"
    by_place = [{fetch.place: fetch for fetch in rank.fetches} for rank in seen.ranks]
    num_drawing = num_same = 0
    name = ""
    for place, first in by_place[0].items():
        together = [fetches[place] for fetches in by_place if place in fetches]
        drawn = [fetch.drawn for fetch in together]
        if len(together) < seen.world_size or not all(drawn):
            continue
        if all(fetch.samples == first.samples for fetch in together):
            continue
        num_drawing += 1
        for generator in first.drawn:
            if len({of_rank.get(generator) for of_rank in drawn}) == 1:
                num_same, name = num_same + 1, generator
    if not num_drawing:
        return ok(check, "Datasets draw no random numbers, or ranks read the same samples.")
    if num_same:
        return wrong(
            check,
            f"In {num_same} of {num_drawing} batches the datasets of all ranks draw the same "
            f"numbers from {name}'s generator, for different samples.",
            "Seed each rank differently (`torch.manual_seed(seed + rank)`, and numpy's and "
            "Python's generators), and let `worker_init_fn` use `torch.initial_seed()`.",
        )
    return ok(check, f"Ranks drew different numbers in {num_drawing} batches.")
