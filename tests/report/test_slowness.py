"""Who is slow is decided from times alone: named where it is so, and nobody where it is not."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.training.events.events import SlowdownCause
from unisono.training.events.slowness import RunFacts, judge
from unisono.training.events.step_sample import COLUMNS, StepSample, StepWindow

RECORDED = Path(__file__).parent / "recorded_steps.npz"
USUAL_MS = {"between": 0.1, "loading": 0.4, "forward": 2.8, "backward": 5.4}
AFTER_MS = {"summing": 0.1, "updating": 0.2}
SLOW_S = 2e-3  # a fifth of a step and a little more
BY_SHARE = [COLUMNS.index(name) for name in ("loading", "forward", "backward")]


def spent(num_workers=2, seed=0, noise=0.05, cores=(), num_steps=96, **slow):
    """Make up the times of steps: who is early waits for who is late.

    Args:
        noise: the deviation of each phase, as a part of it.
        cores: by how much slower than usual the core of each of the first workers is.
        slow: by phase, (rank, seconds) that it takes longer; None: every rank does.
    """
    draw = np.random.default_rng(seed)
    times = np.zeros((num_steps, num_workers, len(COLUMNS)))
    for name, ms in {**USUAL_MS, **AFTER_MS}.items():
        part = times[..., COLUMNS.index(name)]
        part += ms * 1e-3 * draw.lognormal(0.0, noise, part.shape)
    for rank, factor in enumerate(cores):
        times[:, rank] *= factor
    for name, (rank, seconds) in slow.items():
        times[:, slice(None) if rank is None else rank, COLUMNS.index(name)] += seconds
    return with_waiting(times)


def with_waiting(times):
    before = times[..., [COLUMNS.index(name) for name in USUAL_MS]].sum(axis=2)
    times[..., COLUMNS.index("waiting")] = before.max(axis=1, keepdims=True) - before + 2e-5
    return times


def found(times, shards=None, delayed=None, **facts):
    """Judge three windows of the steps."""
    num_workers = times.shape[1]
    windows = [StepWindow(tuple(range(num_workers)), part) for part in np.split(times, 3)]
    run = RunFacts(num_workers if shards is None else shards, **facts)
    return judge(StepSample(tuple(windows), delayed or {}), run)


def causes(findings):
    return [(one.cause, one.rank) for one in findings]


@pytest.mark.parametrize("phase", ["between", "loading", "forward", "backward"])
@pytest.mark.parametrize(("num_workers", "rank"), [(2, 0), (2, 1), (3, 1), (5, 4)])
def test_a_worker_slowed_by_a_fifth_is_named_with_phase_size_and_cost(phase, num_workers, rank):
    (one,) = found(spent(num_workers, noise=0.01, **{phase: (rank, SLOW_S)}))
    assert causes([one]) == [(SlowdownCause.WORKER, rank)]
    words = {"between": "what it does between steps", "loading": "loading its samples"}
    assert f"worker {rank} is slow in {words.get(phase, f'its {phase} pass')}: " in one.sentence
    assert one.cost == pytest.approx(SLOW_S / 11e-3, rel=0.15)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10**6), st.floats(0.0, 0.3), st.integers(1, 3))
def test_an_even_run_says_nothing(num_workers, seed, noise, shards_of_one):
    assert found(spent(num_workers, seed, noise), shards_of_one * num_workers) == ()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 5),
    st.integers(0, 10**6),
    st.sampled_from(["loading", "forward", "backward"]),
    st.lists(st.floats(0.75, 1.35), max_size=5),
)
def test_the_phase_is_right_whatever_the_cores(num_workers, seed, phase, cores):
    rank = seed % num_workers
    times = spent(num_workers, seed, 0.1, cores[:num_workers], **{phase: (rank, SLOW_S)})
    times *= np.random.default_rng(seed).lognormal(0.0, 0.1, (*times.shape[:2], 1))
    slow = [one for one in found(with_waiting(times)) if one.cause is SlowdownCause.WORKER]
    assert {one.rank for one in slow} <= {rank}  # on a faster core it costs nothing
    assert all(phase in one.sentence for one in slow)


def test_real_steps_are_judged_right():
    """Recorded on two cores that now and then differed by a third: 36 times 64 steps.

    In each one of two workers was slower in one phase by about 0.6 of 3 ms; `slow` is -1 where
    none was.
    """
    num_named = 0
    with np.load(RECORDED) as recorded:
        rows = zip(*(recorded[name] for name in ("times_us", "slow", "phase")), strict=True)
        for number, (times, slow, phase) in enumerate(rows):
            parts = np.split(times[..., : len(COLUMNS)] * 1e-6, 2)
            windows = tuple(StepWindow((0, 1), part) for part in parts)
            judged = judge(StepSample(windows, {}), RunFacts(4))
            named = [one for one in judged if one.cause is SlowdownCause.WORKER]
            assert {one.rank for one in named} <= {slow}, number
            assert all(COLUMNS[phase] in one.sentence for one in named), number
            num_named += len(named)
    assert num_named == 21  # of 24: else its core was the faster one, so that nothing was lost


@pytest.mark.parametrize("shards", [0, 3])
def test_a_worker_on_a_slower_core_is_not_called_slow(shards):
    assert found(spent(3, cores=(1.0, 1.33)), shards) == ()


def test_passes_on_a_device_are_not_told_apart():
    (one,) = found(spent(backward=(1, SLOW_S)), is_on_host=False)
    assert "worker 1 is slow in its passes" in one.sentence
    assert "device" in one.remedy


@pytest.mark.parametrize(("share", "is_named"), [(0.6, False), (0.9, True)])
def test_who_is_slow_comes_last_in_nearly_all_steps(share, is_named):
    times = spent()
    for part in np.split(times, 3):
        until = int(share * len(part))
        part[:until, 0, COLUMNS.index("forward")] += 10e-3
        part[until:, 1, COLUMNS.index("forward")] += 10e-3
    assert bool(found(with_waiting(times))) == is_named


@pytest.mark.parametrize(("num_windows", "is_named"), [(1, False), (2, True)])
def test_what_one_window_shows_is_chance(num_windows, is_named):
    times = spent()
    times[: 32 * num_windows, 1, COLUMNS.index("forward")] += 10e-3
    assert bool(found(with_waiting(times))) == is_named


def test_a_worker_that_others_keep_from_its_core_is_not_slow():
    times, delayed = spent(backward=(1, SLOW_S)), {0: 0.02, 1: 0.2}
    (one,) = found(times, delayed=delayed)
    assert (one.cause, one.cost) == (SlowdownCause.BUSY, pytest.approx(0.11))
    assert "the workers wait for a free core, which costs 11 % of the time: start" in one.line
    both = found(times, delayed={0: 0.2, 1: 0.2})
    assert causes(both) == [(SlowdownCause.BUSY, None), (SlowdownCause.WORKER, 1)]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("loading", r"loading takes 4\.\d* ms of a step's .* `num_workers=3`"),
        ("between", r"what lies between steps takes 4\.\d* ms of a step's .* check callbacks"),
    ],
)
def test_what_takes_all_workers_long_is_named_and_no_worker(num_workers, phase, words):
    (one,) = found(spent(num_workers, **{phase: (None, 4e-3)}), loader_workers=2)
    assert one.rank is None
    assert one.cost == pytest.approx(4.2 / 13, rel=0.1)
    assert re.match(words, one.line)


def of_shards(shards, slow=None):
    times = spent(len(shards), noise=0.01)
    for rank, num in enumerate(shards):
        times[:, rank, BY_SHARE] *= num * (1.3 if rank == slow else 1.0)
    return with_waiting(times)


@pytest.mark.parametrize(("shards", "fitting"), [((2, 1), 4), ((3, 3, 2), 9), ((2, 2, 1), 6)])
def test_whoever_has_more_shards_is_not_slow_for_that(shards, fitting):
    (one,) = found(of_shards(shards), sum(shards))
    assert causes([one]) == [(SlowdownCause.UNEVEN, None)]
    assert f"`shards={fitting}` divides evenly" in one.remedy


def test_an_evaluation_between_two_steps_is_no_callback():
    times = spent()
    times[::10, :, COLUMNS.index("between")] += 0.5
    assert found(times) == ()
