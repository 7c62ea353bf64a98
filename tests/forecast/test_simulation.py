"""Steps of N workers follow from what was measured, and behave as steps do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.forecast.made import profile, timed

from unisono.exchange import host_crossing
from unisono.forecast.cluster import BUCKET_BYTES, Cluster
from unisono.forecast.simulation import SimulatedStep, _buckets, simulate
from unisono.forecast.step_profile import StepProfile
from unisono.forecast.workload import divide_work

ALONE = timed((8,), 0.01, spread=0.1, updating_s=0.004, rest_s=0.001)
TWO = timed((4, 4), 0.012, spread=0.1, summing_s=0.001, updating_s=0.003, rest_s=0.002, seed=2)
MEASURED = profile(ALONE, TWO, megabytes=40)
NOISELESS = profile(timed((8,), 0.01), timed((4, 4), 0.01), megabytes=40)


def step(
    found: StepProfile, number: int, cluster: Cluster, *, grows: bool = False
) -> SimulatedStep:
    work = divide_work(found, number, cluster.workers_on_hosts(number), grows=grows)
    return simulate(found, work, cluster)


def test_as_many_workers_as_were_measured_take_what_was_measured() -> None:
    cluster = Cluster(cores=8)
    assert step(MEASURED, 1, cluster).seconds == pytest.approx(ALONE.step_s.mean(), rel=1e-12)
    assert step(MEASURED, 2, cluster).seconds == pytest.approx(TWO.step_s.mean(), rel=2e-3)


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_without_spread_and_with_perfect_links_steps_are_ideal(number: int) -> None:
    cluster = Cluster(per_host=1, bandwidth=1e300, latency_s=0.0)
    found = step(NOISELESS, number, cluster)
    assert found.seconds == pytest.approx(0.08 / number)
    assert found.causes_s["ideal"] == pytest.approx(0.08 / number)


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 8),
    st.booleans(),
    st.floats(1e5, 1e12),
    st.floats(0, 1e-2),
)
def test_causes_add_up_and_faster_links_never_cost_time(
    number: int, per_host: int, grows: bool, bandwidth: float, latency_s: float
) -> None:
    slow = Cluster(4, None, per_host, bandwidth, latency_s)
    found = step(MEASURED, number, slow, grows=grows)
    assert sum(found.causes_s.values()) == pytest.approx(found.seconds)
    for better in (
        replace(slow, bandwidth=bandwidth * 1.7),
        replace(slow, latency_s=latency_s / 2),
    ):
        assert step(MEASURED, number, better, grows=grows).seconds <= found.seconds + 1e-12


@pytest.mark.parametrize(
    ("number", "cores", "shards_s"),
    [
        (3, 8, 3),  # 3, 3 and 2 shards
        (5, 8, 2),
        (8, 8, 1),
        (8, 2, 4),  # four workers a core
        (3, 2, 4),  # all three share until the one with 2 is done at 3; the others need 1 more
    ],
)
def test_shards_that_do_not_divide_and_cores_that_are_shared(
    number: int, cores: int, shards_s: float
) -> None:
    assert step(NOISELESS, number, Cluster(cores)).seconds == pytest.approx(0.01 * shards_s)


def test_beyond_the_shards_the_batch_grows_by_one_shard_a_worker() -> None:
    work = divide_work(MEASURED, 12, [12])
    assert (work.num_shards, work.batch_size, work.is_same_run) == (12, 96, False)
    assert divide_work(MEASURED, 8, [8]).is_same_run
    grown = divide_work(MEASURED, 3, [3], grows=True)
    assert (grown.num_shards, grown.batch_size, grown.is_same_run) == (24, 192, False)
    assert divide_work(MEASURED, 1, [1], grows=True).is_same_run


def test_gradients_travel_while_the_rest_is_computed() -> None:
    # 10 MB become ready at 1/4 … 4/4 of a backward pass of 5 ms. The links carry 10 GB/s of them.
    hosts = Cluster(per_host=1, bandwidth=1e10 * 1538 / 1448, latency_s=0.0)
    found = step(replace(NOISELESS, together=None), 8, hosts)
    each_s = 1e7 * 2 * 7 / 8 / 1e10
    begun_s = 0.005 + 0.005 / 4
    assert each_s > 0.005 / 4, "the link is the bottleneck from the first bucket on"
    assert found.seconds == pytest.approx(begun_s + 4 * each_s)
    assert found.causes_s["bandwidth"] == pytest.approx(begun_s + 4 * each_s - 0.01)
    late = step(replace(NOISELESS, together=None), 8, replace(hosts, latency_s=1e-3))
    assert late.causes_s["bandwidth"] == found.causes_s["bandwidth"]
    # Three meetings, and two rounds of the last bucket; those of the others are behind it.
    assert late.causes_s["latency"] == pytest.approx(5e-3)


def test_buckets_are_as_large_as_those_of_the_exchange() -> None:
    assert BUCKET_BYTES == host_crossing._SLICE_BYTES


def test_buckets_are_cut_from_the_last_parameter_on() -> None:
    mib = 1 << 20
    found = replace(NOISELESS, gradient_bytes=(3 * mib, 0, 2 * mib), ready=(1.0, 0.6, 0.5))
    assert list(_buckets(found, 4)) == [(0.5, 2 * mib), (1.0, 2 * mib), (1.0, mib)]
    assert list(_buckets(replace(found, gradient_bytes=(0, 0, 0)), 2)) == []


def test_copying_takes_a_core_from_passes_but_not_from_a_link_that_is_waited_for() -> None:
    sent_s = 4e7 * 2 * 7 / 8 * 1e-10  # 7 ms of a core
    fast = Cluster(per_host=1, bandwidth=1e18, latency_s=0.0)
    alone = replace(NOISELESS, together=None)
    ideal, copied = (step(alone, 8, replace(fast, copying_s=c)).seconds for c in (0.0, 1e-10))
    assert ideal == pytest.approx(0.01, rel=0.01)
    assert copied == pytest.approx(0.01 + sent_s)
    slow = replace(fast, bandwidth=1e8)
    ideal, copied = (step(alone, 8, replace(slow, copying_s=c)).seconds for c in (0.0, 1e-10))
    assert copied == pytest.approx(ideal, rel=2e-3)
    # What is ready before the passes end is copied before, so the last quarter is ready later.
    even = replace(fast, bandwidth=4e7 * 2 * 7 / 8 / 0.004 * 1538 / 1448, copying_s=1e-10)
    first_s = 0.001 * 8 * BUCKET_BYTES / 1e7  # of the last quarter, until its first bucket is there
    assert step(alone, 8, even).seconds == pytest.approx(0.01 + sent_s + first_s)
    # Two workers of a host have two cores.
    two = replace(fast, per_host=2, copying_s=1e-10)
    assert step(alone, 8, two).seconds == pytest.approx(0.01 + 4e7 * 2 * 3 / 4 * 1e-10 / 2)


def test_a_slow_link_is_what_limits_and_a_fast_one_is_hidden() -> None:
    slow = step(NOISELESS, 8, Cluster(per_host=1, bandwidth=1e8))
    assert max(slow.causes_s, key=slow.causes_s.__getitem__) == "bandwidth"
    fast = step(NOISELESS, 8, Cluster(per_host=1, bandwidth=1e12, latency_s=1e-6))
    assert fast.causes_s["bandwidth"] + fast.causes_s["latency"] < 1e-4


def test_more_workers_wait_longer_for_the_slowest() -> None:
    costs = [
        step(MEASURED, number, Cluster(), grows=True).causes_s["stragglers"]
        for number in (2, 8, 64, 1024)
    ]
    assert costs == sorted(costs)
    assert costs[0] > 0


def test_an_update_that_one_worker_makes_for_all_is_not_divided() -> None:
    whole = replace(TWO, updating_s=np.full(64, 0.004))
    found = profile(ALONE, whole)
    one, eight = (step(found, number, Cluster(cores=8)) for number in (1, 8))
    assert one.causes_s["update"] == pytest.approx(0.0, abs=1e-12)
    assert eight.causes_s["update"] == pytest.approx(0.004 * 7 / 8)


def test_two_workers_that_were_faster_than_one_do_not_make_eight_faster_still() -> None:
    found = profile(timed((8,), 0.01), timed((4, 4), 0.008))
    assert step(found, 8, Cluster(cores=8)).seconds == pytest.approx(0.008)
    slower = profile(timed((8,), 0.01), timed((4, 4), 0.012))
    assert step(slower, 8, Cluster(cores=8)).seconds == pytest.approx(0.01 + 7 * 0.002)
