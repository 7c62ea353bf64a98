"""Who is slow is decided from times alone: named where it is so, and nobody where it is not."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.machine_load import MachineLoad
from unisono.train.confirmation import Confirmed
from unisono.train.slowdown import Slowdown, SlowdownCause
from unisono.train.slowness import SLOW_BY, judge
from unisono.train.step_window import COLUMNS, StepWindow

RECORDED = Path(__file__).parent / "recorded_steps.npz"
USUAL_MS = {"between": 0.1, "loading": 0.4, "forward": 0.8, "backward": 1.4}
AFTER_MS = {"summing": 0.1, "updating": 0.2}
CROWDED = MachineLoad(2, 2.0, 0.5, runnable=9.0)
FREE = MachineLoad(8, 2.0, 2.0, runnable=2.0)


def spent(num_workers=2, num_steps=64, seed=0, noise=0.05, late_in=0.0, cores=(), **slow):
    """Make up the times of a window: who is early waits for who is late.

    Args:
        noise: the deviation of each phase, as a part of it.
        late_in: the part of steps in which a worker waits 3 ms for a core.
        cores: by how much slower than usual the core of each of the first workers is.
        slow: by phase, (rank, seconds) that it takes longer.
    """
    draw = np.random.default_rng(seed)
    times = np.zeros((num_steps, num_workers, len(COLUMNS)))
    for name, ms in {**USUAL_MS, **AFTER_MS}.items():
        part = times[..., COLUMNS.index(name)]
        part += ms * 1e-3 * draw.lognormal(0.0, noise, part.shape)
    for rank, factor in enumerate(cores):
        times[:, rank] *= factor
    for name, (rank, seconds) in slow.items():
        times[:, rank, COLUMNS.index(name)] += seconds
    delays = 3e-3 * (draw.random((num_steps, num_workers)) < late_in)
    times[..., COLUMNS.index("backward")] += delays
    times[..., COLUMNS.index("delayed")] = delays
    return with_waiting(times)


def with_waiting(times):
    before = times[..., [COLUMNS.index(name) for name in USUAL_MS]].sum(axis=2)
    times[..., COLUMNS.index("waiting")] = before.max(axis=1, keepdims=True) - before + 2e-5
    return times


def window(times, **change):
    num_workers = times.shape[1]
    given = {"ranks": tuple(range(num_workers)), "shards": (2,) * num_workers, "batch_size": 64}
    return StepWindow(times=times, **{**given, **change})


def of_cause(found, cause):
    return [one for one in found if one.cause is cause]


def slow_workers(found):
    return of_cause(found, SlowdownCause.WORKER)


@pytest.mark.parametrize("phase", ["loading", "forward", "backward", "between", "updating"])
@pytest.mark.parametrize(("num_workers", "rank"), [(2, 0), (2, 1), (3, 1), (5, 4)])
@pytest.mark.parametrize("late_in", [0.0, 0.3])
def test_a_worker_slowed_by_a_fifth_is_named_with_phase_and_size(phase, num_workers, rank, late_in):
    """A step takes 3 ms."""
    times = spent(num_workers, late_in=late_in, **{phase: (rank, 0.6e-3)})
    (found,) = slow_workers(judge(window(times)))
    assert (found.rank, found.phases) == (rank, (phase,))
    assert found.excess_s == pytest.approx(0.6e-3, rel=0.25)
    assert f"worker {rank} is slow in" in found.sentence


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 6), st.integers(0, 10**6), st.floats(0.0, 0.3), st.sampled_from([0.0, 0.1, 0.4])
)
def test_an_even_run_accuses_nobody(num_workers, seed, noise, late_in):
    times = spent(num_workers, seed=seed, noise=noise, late_in=late_in)
    assert slow_workers(judge(window(times))) == []


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 5),
    st.integers(0, 10**6),
    st.sampled_from(["loading", "forward", "backward"]),
    st.lists(st.floats(0.75, 1.35), max_size=5),
)
def test_size_and_phase_are_right_whatever_the_cores(num_workers, seed, phase, cores):
    """The noise is that of real steps: as much for the whole step of a worker as for a phase."""
    rank = seed % num_workers
    times = spent(
        num_workers, seed=seed, noise=0.1, cores=cores[:num_workers], **{phase: (rank, 0.6e-3)}
    )
    times *= np.random.default_rng(seed).lognormal(0.0, 0.1, (*times.shape[:2], 1))
    (found,) = slow_workers(judge(window(with_waiting(times))))
    assert (found.rank, found.phases[0]) == (rank, phase)
    assert 0.7 * 0.6e-3 < found.excess_s < 1.5 * 0.6e-3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_slower_core_is_told_of_but_no_slow_worker(num_workers, rank):
    """All of 3 ms takes a third longer."""
    cores = [1.33 if one == rank else 1.0 for one in range(num_workers)]
    found = judge(window(with_waiting(spent(num_workers, cores=cores))))
    assert [(one.cause, one.rank) for one in found] == [(SlowdownCause.CORE, rank)]
    assert found[0].excess_s == pytest.approx(1e-3, rel=0.1)
    assert f"everything takes worker {rank} 1.3" in found[0].sentence
    assert "is slow" not in found[0].sentence


def test_windows_of_real_steps_are_judged_right():
    """Recorded on two cores that now and then differed by a third; see ``straggling.py``.

    Each is of 64 steps of two workers, of whom one was slower in one phase by about 0.6 of 3 ms;
    `slow` is -1 where none was.
    """
    with np.load(RECORDED) as recorded:
        rows = zip(
            *(recorded[name] for name in ("times_us", "slow", "phase", "planted_us")), strict=True
        )
        for number, (times, slow, phase, planted) in enumerate(rows):
            found = slow_workers(judge(window(times * 1e-6)))
            named = [(one.rank, one.phases[0]) for one in found]
            assert named == ([] if slow < 0 else [(slow, COLUMNS[phase])]), number
            assert all(0.7 < one.excess_s * 1e6 / planted < 1.5 for one in found), (number, found)
    assert number >= 30


def test_a_device_that_all_is_slow_on_is_no_core():
    times = spent(cores=(1.0, 1.33))
    (found,) = judge(window(with_waiting(times), is_on_host=False))
    assert "device" in found.sentence
    assert "device" in found.remedy


def test_who_is_slow_on_a_faster_core_costs_little():
    """What it takes longer in one phase is made good by its core in the others."""
    times = spent(noise=0.01, cores=(1.0, 0.8), backward=(1, 0.6e-3))
    (found,) = slow_workers(judge(window(with_waiting(times))))
    assert found.excess_s == pytest.approx(0.6e-3, rel=0.1)
    assert found.lost_s < 0.1e-3
    assert found.of_step < 0.05


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-3, 50.0), st.integers(0, 2))
def test_what_is_found_does_not_depend_on_the_unit_or_on_who_is_which_rank(seed, times_longer, by):
    times = spent(3, seed=seed, forward=(1, 0.6e-3)) * max(times_longer, 0.1)
    first = judge(window(times))
    turned = judge(window(np.roll(times, by, axis=1)))
    assert [one.rank for one in slow_workers(first)] == [1]
    assert [one.rank for one in slow_workers(turned)] == [(1 + by) % 3]
    assert slow_workers(turned)[0].excess_s == pytest.approx(slow_workers(first)[0].excess_s)


def test_who_is_slow_now_and_then_is_not_called_slow():
    times = spent()
    times[::3, 0, COLUMNS.index("forward")] += 5e-3
    assert slow_workers(judge(window(with_waiting(times)))) == []


@pytest.mark.parametrize(("share", "is_named"), [(0.6, False), (0.9, True)])
def test_who_is_slow_comes_last_in_nearly_all_steps(share, is_named):
    times = spent()
    until = int(share * len(times))
    times[:until, 0, COLUMNS.index("forward")] += 5e-3
    times[until:, 1, COLUMNS.index("forward")] += 5e-3
    assert bool(slow_workers(judge(window(with_waiting(times))))) == is_named


def test_the_phase_is_named_though_another_one_is_delayed():
    """Worker 1 waits for a core in most steps, while it loads."""
    times = spent(forward=(1, 0.6e-3))
    times[:40, 1, COLUMNS.index("loading")] += 3e-3
    times[:40, 1, COLUMNS.index("delayed")] = 3e-3
    (found,) = slow_workers(judge(window(with_waiting(times))))
    assert found.phases == ("forward",)
    assert found.excess_s == pytest.approx(0.6e-3, rel=0.25)


def test_a_busy_machine_is_as_busy_whatever_is_between_steps():
    times = spent(late_in=0.5)
    first = [one.of_step for one in judge(window(times)) if one.cause is SlowdownCause.BUSY]
    times[::10, :, COLUMNS.index("between")] += 0.5
    again = [one.of_step for one in judge(window(times)) if one.cause is SlowdownCause.BUSY]
    assert first == pytest.approx(again, rel=0.1)
    assert first[0] > 0.2


@pytest.mark.parametrize(("part", "is_named"), [(0.5 * SLOW_BY, False), (2 * SLOW_BY, True)])
def test_a_little_longer_than_the_others_is_not_slow(part, is_named):
    usual_s = sum({**USUAL_MS, **AFTER_MS}.values()) * 1e-3
    times = spent(noise=0.001, backward=(1, part * usual_s))
    assert bool(slow_workers(judge(window(times)))) == is_named


def test_what_a_leader_does_for_all_is_no_slowness():
    times = spent(noise=0.001, between=(0, 4e-5)) * 0.1
    times[:, 0, COLUMNS.index("between")] += 3.9e-5
    assert slow_workers(judge(window(with_waiting(times)))) == []


def test_a_core_that_everything_is_slow_on_is_named_with_both_passes():
    times = spent(forward=(1, 0.5e-3), backward=(1, 0.6e-3))
    (found,) = slow_workers(judge(window(times)))
    assert found.phases == ("backward", "forward")
    assert "slow in its passes" in found.sentence
    assert found.excess_s == pytest.approx(1.1e-3, rel=0.2)


def test_passes_on_a_device_are_not_told_apart():
    times = spent(backward=(1, 0.6e-3))
    (found,) = slow_workers(judge(window(times, is_on_host=False)))
    assert found.phases == ("forward", "backward")
    assert "device" in found.remedy


def test_waiting_for_a_core_is_the_machines_fault():
    """Worker 1 has to share its core in every step, by as much as would be slow."""
    times = spent(backward=(1, 1e-3))
    times[:, 1, COLUMNS.index("delayed")] = 1e-3
    found = judge(window(times, machine=CROWDED))
    assert [one.cause for one in found] == [SlowdownCause.BUSY]
    assert found[0].excess_s == pytest.approx(1e-3, rel=0.2)
    assert "2 cores, of which the workers use 0.5, other programs 1.5" in found[0].sentence


@pytest.mark.parametrize(("machine", "is_named"), [(CROWDED, False), (FREE, True), (None, True)])
@pytest.mark.parametrize("is_threaded", [False, True])
def test_where_delays_are_not_seen_a_crowded_machine_accuses_nobody(machine, is_named, is_threaded):
    times = spent(backward=(1, 1e-3))
    if not is_threaded:
        times[..., COLUMNS.index("delayed")] = np.nan
    found = judge(window(times, machine=machine, has_threads=is_threaded))
    assert bool(slow_workers(found)) == is_named


def test_stolen_time_is_given_the_benefit_of_the_doubt():
    times = spent(backward=(1, 0.6e-3))
    stolen = MachineLoad(2, 2.0, 2.0, stolen=0.1)
    assert slow_workers(judge(window(times, machine=stolen))) == []


def of_shards(shards, slow=None):
    times = spent(len(shards), noise=0.01)
    for rank, num in enumerate(shards):
        times[:, rank, 1:4] *= num
    if slow is not None:
        times[:, slow, 1:4] *= 1.3
    return with_waiting(times)


@pytest.mark.parametrize(
    ("shards", "fitting", "excess_s"),
    [((2, 1), 4, 0.5 * 2.6e-3), ((3, 3, 2), 9, 2.6e-3 / 3), ((2, 2, 1), 6, 2.6e-3 / 3)],
)
def test_whoever_has_more_shards_is_not_slow_for_that(shards, fitting, excess_s):
    (found,) = judge(window(of_shards(shards), shards=shards))
    assert found.cause is SlowdownCause.UNEVEN
    assert found.rank is None
    assert found.excess_s == pytest.approx(excess_s, rel=0.1)
    assert f"`shards={fitting}` divides evenly" in found.remedy


def test_whoever_is_slow_beside_having_more_shards_is_named_too():
    found = judge(window(of_shards((2, 1), slow=0), shards=(2, 1)))
    assert {one.cause for one in found} == {SlowdownCause.UNEVEN, SlowdownCause.WORKER}
    (slow,) = slow_workers(found)
    assert slow.rank == 0
    assert slow.excess_s == pytest.approx(0.3 * 2 * 2.6e-3, rel=0.15)
    assert "more than is usual for its shards" in slow.sentence


def test_a_slower_device_with_fewer_shards_is_not_slow():
    times = spent(2, noise=0.01)
    times[:, 0, 1:4] *= 5 * 1.0
    times[:, 1, 1:4] *= 3 * 1.6
    change = {"shards": (5, 3), "speeds": (1.0, 1 / 1.6)}
    assert judge(window(with_waiting(times), **change)) == ()


def test_mixed_devices_that_cannot_be_divided_better_are_told():
    times = spent(2, noise=0.01)
    times[:, 0, 1:4] *= 2
    times[:, 1, 1:4] *= 1.5
    (found,) = judge(window(with_waiting(times), shards=(2, 1), speeds=(1.0, 1 / 1.5)))
    assert found.cause is SlowdownCause.DEVICES
    assert "more `shards`" in found.remedy


def test_a_whole_update_is_the_optimizers_fault():
    times = spent(2, updating=(0, 2e-3))
    (found,) = [
        one for one in judge(window(times, updater=0)) if one.cause is not SlowdownCause.SMALL
    ]
    assert found.cause is SlowdownCause.WHOLE_UPDATE
    assert found.excess_s == pytest.approx(1.1e-3, rel=0.1)
    assert "worker 0 alone updates" in found.sentence


def test_waiting_that_both_have_accuses_neither():
    """2.3 of 22 ms, as now one and now another comes last."""
    draw = np.random.default_rng(1)
    times = spent() * 8
    times[..., COLUMNS.index("backward")] += draw.exponential(4e-3, times.shape[:2])
    (found,) = judge(window(with_waiting(times)))
    assert (found.cause, found.rank) == (SlowdownCause.ALIKE, None)
    assert "no worker is slow, but each waits about" in found.sentence


@pytest.mark.parametrize(("batch_size", "remedy"), [(5, "`batch_size=6`"), (64, ""), (63, "")])
def test_a_batch_that_does_not_divide_is_why_workers_take_turns_to_be_last(batch_size, remedy):
    times = spent(noise=0.01)
    times[::2, 0, 1:4] *= 1.5
    times[1::2, 1, 1:4] *= 1.5
    (found,) = judge(window(with_waiting(times), shards=(1, 1), batch_size=batch_size))
    assert found.cause is SlowdownCause.ALIKE
    assert found.remedy.startswith(remedy)
    assert bool(found.remedy) == bool(remedy)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_small_batches_are_told(num_workers):
    times = spent(num_workers, noise=0.01)
    times[..., 1:4] *= 0.1
    (found,) = judge(window(with_waiting(times)))
    assert found.cause is SlowdownCause.SMALL
    assert "0.26 ms of loading and passes" in found.sentence


def test_one_worker_has_nobody_to_be_compared_with():
    assert judge(window(spent(1))) == ()


def test_an_evaluation_between_two_steps_counts_for_nothing():
    times = spent(forward=(1, 0.6e-3))
    times[::10, :, COLUMNS.index("between")] += 0.5
    times[::10, 0, COLUMNS.index("between")] += 0.1
    (found,) = judge(window(with_waiting(times)))
    assert (found.cause, found.rank, found.phases) == (SlowdownCause.WORKER, 1, ("forward",))
    assert found.of_step == pytest.approx(0.6 / 3.7, rel=0.2)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_next_to_no_steps_are_no_error(num_steps):
    judge(window(spent(num_steps=num_steps)))


def finding(cause, excess_s, rank=None):
    return Slowdown(cause, excess_s, excess_s, 0.1, 0.1, "it is slow", "", rank)


A, B = (SlowdownCause.WORKER, 1), (SlowdownCause.BUSY, None)


@pytest.mark.parametrize(
    ("windows", "now", "in_all"),
    [
        ([], {}, {}),
        ([[A]], {}, {}),
        ([[A], [B]], {}, {}),
        ([[A], []], {}, {}),
        ([[A], [A]], {A: 0.2}, {A: 0.2}),
        ([[A], [A], []], {}, {A: 0.2}),
        ([[A], [A], [], [A]], {}, {A: 0.2}),
        ([[A], [A, B], [A, B]], {A: 0.3, B: 0.2}, {A: 0.3, B: 0.2}),
        ([[(SlowdownCause.WORKER, 0)], [A]], {}, {}),
    ],
)
def test_what_two_windows_in_a_row_show_is_told(windows, now, in_all):
    """Each stands for ten steps that take 0.01 s too long, of a loop that lasts a second."""
    made = Confirmed()
    for found in windows:
        made.add([finding(cause, 0.01, rank) for cause, rank in found], 10)
    assert {one.key: one.cost for one in made.now(1.0)} == pytest.approx(now)
    assert {one.key: one.cost for one in made.over_all(1.0)} == pytest.approx(in_all)
    assert made.over_all(100.0) == ()


def test_the_line_says_what_it_costs_and_what_to_do():
    (found,) = slow_workers(judge(window(spent(loading=(1, 0.6e-3)), loader_workers=1)))
    line = found.costing(0.17).line
    assert line.startswith("worker 1 is slow in loading its samples: 0.99")
    assert ", which costs 17 % of the run: read ahead with `loader_workers=2`" in line
