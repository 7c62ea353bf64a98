"""How a run stands after some events."""

import pytest
from tests.report.lines import ROW, status_of, step, workers
from tests.report.synthetic import BEGAN_UNIX_S, PHASES, start_line

from unisono.tools.report.history import Spent
from unisono.tools.report.run_progress import Named
from unisono.tools.report.view import worker_lines


def test_speed_is_right_where_steps_were_passed_over():
    made = status_of(start_line(), step(0, 0), step(100, 1), step(200, 2))
    assert made.steps_per_s == pytest.approx(100.0)


@pytest.mark.parametrize("time_unix_s", [0.0, -1e300, 1e300, "nan", "inf", None])
def test_a_clock_that_is_wrong_breaks_nothing(time_unix_s):
    wrong = {**step(1, 0), "time_unix_s": time_unix_s}
    made = status_of(start_line(), step(0, 5), wrong, step(2, 6))
    assert made.progress.num_done == 3


def test_the_process_of_a_lost_worker_is_known_until_another_has_come():
    lost = workers(1, ranks=[0], pids=[4000], lost=[1], why=["worker 1 was killed by SIGKILL"])
    assert status_of(start_line(), lost).progress.named[1].pid == 4001
    come = workers(5, 9.0, ranks=[0, 1], pids=[4000, 77], joined=[1])
    found = status_of(start_line(), lost, come).progress
    assert found.named[1] == Named(77, BEGAN_UNIX_S + 9.0)
    assert found.trouble.text == "worker 1 was killed by SIGKILL"


def test_whoever_comes_without_a_process_number_has_not_that_of_the_one_before():
    lost = workers(1, ranks=[0], pids=[4000], lost=[1])
    come = workers(5, 9.0, ranks=[0, 1], pids=[4000, None], joined=[1])
    assert status_of(start_line(), lost, come).progress.named.keys() == {0}
    assert status_of(start_line(pids=[None, None])).progress.named == {}


def test_times_are_of_the_workers_that_there_are():
    made = status_of(start_line(), step(0, 0.5), workers(1, ranks=[0], lost=[1]))
    assert not made.recent


def test_a_worker_lost_in_a_step_has_no_times():
    lines = {f"{name}_s": [0.001, None] for name in PHASES}
    first, second = worker_lines(status_of(start_line(), {**step(0, 1), **lines}), {})
    assert first.shares
    assert second.shares is None


def test_the_newest_memory_of_each_device_is_known():
    told = {"allocated_bytes": [10, None]}
    made = status_of(start_line(), {**step(0, 1), **told}, step(1, 2))
    assert made.memory == {0: 10, 1: None}
    assert status_of(start_line(), {**step(0, 1), **told}, start_line(step=1)).memory == {}


def test_shares_add_up():
    found = Spent(list(ROW), 1).shares
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["backward"] == pytest.approx(0.4)
    assert Spent([0.0] * 6, 1).shares == {}
