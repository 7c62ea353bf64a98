"""What workers of one host cost each other, between and beyond what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.forecast.made import profile, timed

from unisono.forecast.cluster import sent_bytes
from unisono.forecast.host_model import HostModel
from unisono.forecast.step_profile import StepProfile
from unisono.forecast.workload import divide_work

ALONE = timed((8,), 0.01, summing_s=0.001, updating_s=0.008, rest_s=0.001)
TWO = timed((4, 4), 0.012, summing_s=0.003, updating_s=0.005, rest_s=0.004)
MEASURED = profile(ALONE, TWO)


def host(found: StepProfile, *on_hosts: int, cores: int | None = None) -> HostModel:
    return HostModel(found, divide_work(found, sum(on_hosts), on_hosts), cores)


def times(found: StepProfile, *on_hosts: int, cores: int | None = None) -> list[float]:
    """Give the seconds of a shard, of adding up, of the optimizer and of the rest."""
    model, drawn = host(found, *on_hosts, cores=cores), found.several
    own = [model.summing_s(drawn.summing_s), model.updating_s(drawn.updating_s)]
    found_s = [float(one.mean()) for one in (*own, model.rest_s(drawn.rest_s))]
    return [model.shard_s, *found_s]


@pytest.mark.parametrize(
    ("on_hosts", "cores", "expected"),
    [
        # Two read half of the gradients once; of the optimizer's 8 ms, 6 are divided.
        ((2,), None, [0.012, 0.003, 0.005, 0.004]),
        # Four read three quarters; meetings have one more round of two.
        ((4,), None, [0.016, 0.001 + 0.002 * (3 / 4) / (1 / 2), 0.002 + 0.006 / 4, 0.007]),
        ((8,), None, [0.024, 0.001 + 0.002 * (7 / 8) / (1 / 2), 0.002 + 0.006 / 8, 0.010]),
        # Two cores are busy, whoever shares them.
        ((4,), 2, [0.012, 0.001 + 0.002 * (3 / 2) / (1 / 2), 0.005, 0.007]),
        # Two hosts add up their own two parts; the other's come while buckets travel.
        ((2, 2), None, [0.012, 0.003, 0.005, 0.004]),
        # One worker a host is alone on it.
        ((1, 1), None, [0.010, 0.001, 0.008, 0.001]),
    ],
)
def test_times_of_a_host(
    on_hosts: tuple[int, ...], cores: int | None, expected: list[float]
) -> None:
    assert times(MEASURED, *on_hosts, cores=cores) == pytest.approx(expected)


def test_replicas_send_their_parts_through_the_hosts_memory() -> None:
    staged = replace(MEASURED, exchange="staged")
    assert times(staged, 8)[3] == pytest.approx(0.001 + 0.003 * 7)


def test_one_worker_that_was_measured_alone_says_little_of_others() -> None:
    alone = replace(MEASURED, together=None)
    assert times(alone, 4) == pytest.approx([0.010, 0.001, 0.002, 0.001])
    assert times(replace(alone, exchange="staged"), 4)[2] == pytest.approx(0.008)


def test_a_host_sends_each_of_its_parts_and_its_sum() -> None:
    three = divide_work(MEASURED, 3, [1, 1, 1])  # 3, 3 and 2 of 8 shards: at most two sub-trees
    assert three.parts_of_host == 2
    assert sent_bytes(1e6, three) == pytest.approx(3 * 2 / 3 * 1e6)
    four = divide_work(MEASURED, 4, [1, 1, 1, 1])
    assert sent_bytes(1e6, four) == pytest.approx(2 * 3 / 4 * 1e6), "as a ring all-reduce"


def test_who_has_fewer_shards_leaves_the_cores_to_others() -> None:
    sharing = host(MEASURED, 3, cores=2).sharing  # 3, 3 and 2 shards on two cores
    assert sharing(2) == pytest.approx(1.5)
    assert sharing(3) == pytest.approx((2 * 1.5 + 1) / 3)
    assert host(MEASURED, 8, cores=2).sharing(1) == 4
    assert host(MEASURED, 2, cores=8).sharing(4) == 1


def test_nothing_is_negative_where_measurements_contradict() -> None:
    odd = replace(TWO, summing_s=np.zeros(64), rest_s=np.zeros(64), updating_s=np.full(64, 0.001))
    assert min(times(profile(ALONE, odd), 64)) >= 0
