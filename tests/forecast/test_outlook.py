"""Epochs, speed-up and failures of each number of workers."""

from __future__ import annotations

import json
import math

import pytest
from tests.forecast.made import profile, timed

from unisono.forecast.cluster import Cluster
from unisono.forecast.facts import Forecast
from unisono.forecast.outlook import Failures, expectations
from unisono.forecast.step_profile import given_profile

HOUR = 3600.0
CLASSIC = given_profile(7.2, 128, 1_280_000)
NONE = Failures()


def test_the_classic_sum_is_the_ideal_line() -> None:
    one, many = expectations(CLASSIC, [1, 32], Cluster(), NONE, epochs=100, grows=True)
    assert one.total_s == pytest.approx(2000 * HOUR)
    assert many.total_s == pytest.approx(62.5 * HOUR)
    assert (many.speed_up, many.efficiency) == (pytest.approx(32), pytest.approx(1))
    assert (many.batch_size, many.limited_by) == (4096, "")


def test_a_short_last_batch_takes_its_part_of_the_passes_and_all_of_the_rest() -> None:
    found = profile(timed((8,), 0.01, updating_s=0.02))
    (one,) = expectations(found, [1], Cluster(), NONE)  # 156 steps of 64, and one of 16
    assert one.epoch_s == pytest.approx(156 * 0.1 + 0.08 / 4 + 0.02)


@pytest.mark.parametrize("num_hosts", [1, 4])
def test_failures_cost_their_rate_times_what_one_of_them_costs(num_hosts: int) -> None:
    failures = Failures(1000 * HOUR, recovery_s=60.0, restart_s=300.0, checkpoint_s=600.0)
    cluster = Cluster(hosts=num_hosts)
    (without,) = expectations(CLASSIC, [64], cluster, NONE, grows=True)
    (found,) = expectations(CLASSIC, [64], cluster, failures, grows=True)
    assert found.epoch_s is not None
    assert without.epoch_s is not None
    num_failures = found.epoch_s * 64 / (1000 * HOUR)
    each_s = 60.0 if num_hosts == 1 else 300.0 + 600.0 / 2
    assert found.epoch_s - without.epoch_s == pytest.approx(num_failures * each_s)
    assert found.speed_up == pytest.approx(64 * without.epoch_s / found.epoch_s)


def test_a_run_that_only_recovers_never_ends_and_says_so_in_json() -> None:
    failures = Failures(HOUR, recovery_s=HOUR / 8)
    row = expectations(CLASSIC, [8], Cluster(), failures, epochs=2, grows=True)[0]
    assert row.epoch_s == math.inf
    assert row.limited_by == "failures"
    told = row.as_json
    assert (told["epoch_s"], told["total_s"], told["speed_up"]) == (None, None, 0.0)


def test_a_band_is_wider_where_measurements_vary_more() -> None:
    def width(spread: float) -> float:
        found = profile(timed((8,), 0.01, spread=spread), timed((4, 4), 0.01, spread=spread))
        (row,) = expectations(found, [16], Cluster(), NONE)
        assert row.step_band_s is not None
        low, high = row.step_band_s
        assert low <= row.step_s <= high
        assert row.speed_up_band is not None
        return high - low

    assert width(0.0) == pytest.approx(0.0, abs=1e-12)
    assert 0 < width(0.05) < width(0.3)


def test_what_was_given_has_no_band() -> None:
    (row,) = expectations(CLASSIC, [4], Cluster(), NONE)
    assert (row.step_band_s, row.speed_up_band) == (None, None)


def test_spread_alone_costs_the_expected_maximum() -> None:
    found = given_profile(1.0, 128, 12_800, spread=0.05)
    (one, two) = expectations(found, [1, 2], Cluster(), NONE, grows=True)
    assert one.step_s == pytest.approx(1.0)
    assert two.step_s == pytest.approx(1 + 0.05 / math.sqrt(math.pi), rel=2e-3)


def test_nobody_knows_the_epoch_of_an_endless_stream() -> None:
    from dataclasses import replace

    (row,) = expectations(replace(CLASSIC, num_samples=None), [2], Cluster(), NONE, epochs=3)
    assert (row.epoch_s, row.total_s) == (None, None)


def test_a_forecast_says_what_it_supposes() -> None:
    found = profile(timed((2,), 0.01), timed((1, 1), 0.01), megabytes=4)
    cluster = Cluster(cores=2, per_host=2)
    failures = Failures(100 * HOUR, 5.0, 20.0, 600.0)
    rows = expectations(found, [1, 2, 8], cluster, failures)
    told = Forecast("train.py", "cpu", found, cluster, failures, None, rows).as_json
    text = " ".join(told["assumptions"])
    for words in (
        "1 worker (20 ms a step, 64 steps) and 2 workers (10 ms a step",
        "More than 2 workers: simulated, not measured",
        "From 8 workers on the batch grows",
        "Several hosts were not run",
        "10 Gbit/s each way",
        "every 100 h",
    ):
        assert words in text
    assert json.loads(json.dumps(told, allow_nan=False)) == told
