"""Phases add up, and waiting for a core is told apart where the kernel counts it."""

import math
import os
import subprocess
import sys

import pytest
from tests.threads import in_threads

from unisono.step import phase_timers
from unisono.step.phase_timers import DELAYED, Phase, PhaseTimers, RunDelay


class Delays:
    """Says how long a thread has waited, one number after the other."""

    def __init__(self, *seconds):
        self.seconds_left = list(seconds)

    def seconds(self):
        return self.seconds_left.pop(0)

    def close(self):
        self.seconds_left = None


@pytest.fixture
def clock(monkeypatch):
    now_s = [5.0]
    monkeypatch.setattr(phase_timers, "perf_counter", lambda: now_s[0])
    return now_s


def step(timers, clock, lasts_s):
    timers.begin()
    clock[0] += lasts_s
    timers.lap(Phase.FORWARD)
    timers.arrive()
    return timers.times[DELAYED]


def test_phases_add_up(clock):
    timers = PhaseTimers()
    timers.begin()
    for phase in (Phase.LOADING, Phase.FORWARD, Phase.LOADING):
        clock[0] += 0.5
        timers.lap(phase)
    timers.arrive()
    assert timers.times[:7] == [5.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert math.isnan(timers.times[DELAYED])


def test_delays_of_long_steps_are_always_known(clock):
    timers = PhaseTimers(Delays(1.0, 1.5, 2.0, 2.25))
    assert math.isnan(step(timers, clock, 0.01))  # nobody knows yet how long steps are
    assert [step(timers, clock, 0.01) for _ in range(2)] == [0.5, 0.25]


def test_of_short_steps_every_eighth_is_looked_at(clock):
    timers = PhaseTimers(Delays(*range(100)))
    known = [not math.isnan(step(timers, clock, 0.0003)) for _ in range(24)]
    assert [number for number, one in enumerate(known) if one] == [7, 15, 23]


def test_delays_are_not_looked_at_while_nobody_wants_to_know(clock):
    timers = PhaseTimers(Delays(1.0, 1.5, 2.0, 2.25))
    step(timers, clock, 0.01)
    sought = [True, False, False, True]
    for timers.are_delays_sought in sought:
        assert math.isnan(step(timers, clock, 0.01)) != timers.are_delays_sought


def test_delays_are_asked_for_no_more_once_closed():
    delays = Delays()
    PhaseTimers(delays).close()
    assert delays.seconds_left is None


def test_the_kernels_count_of_this_thread_is_read():
    delay = RunDelay()
    if math.isnan(first := delay.seconds()):
        pytest.skip("this kernel does not count")
    in_threads(3, lambda _: sum(range(10**6)))
    assert 0 <= first <= delay.seconds() < 3600
    delay.close()
    delay.close()
    assert math.isnan(delay.seconds())


WAITS = """
import os, sys, time
from unisono.step.phase_timers import RunDelay
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
pid = os.fork()
if not pid:
    while True: pass
delay = RunDelay()
begin_s, before_s = time.perf_counter(), delay.seconds()
while time.perf_counter() < begin_s + 0.4: pass
print(delay.seconds() - before_s, time.perf_counter() - begin_s)
os.kill(pid, 9); os.wait()
"""


def test_waiting_for_a_core_that_another_uses_is_counted():
    """Two processes share a core, so that each waits for about half of the time."""
    if math.isnan(RunDelayOnce.seconds()):
        pytest.skip("this kernel does not count")
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, check=True)
    delay_s, passed_s = map(float, done.stdout.split())
    assert 0.05 < delay_s < passed_s


class RunDelayOnce:
    @staticmethod
    def seconds():
        delay = RunDelay()
        found = delay.seconds()
        delay.close()
        return found


@pytest.mark.parametrize("text", ["", "0 0 0\n", "1 2", "a b c"])
def test_a_kernel_that_does_not_count_says_nothing(text, tmp_path):
    path = tmp_path / "schedstat"
    path.write_text(text)
    delay = RunDelay(str(path))
    assert math.isnan(delay.seconds())
    delay.close()


def test_a_file_that_is_not_there_says_nothing(tmp_path):
    delay = RunDelay(str(tmp_path / "none"))
    assert math.isnan(delay.seconds())
    delay.close()


def test_a_descriptor_that_the_program_has_closed_says_nothing(tmp_path):
    path = tmp_path / "schedstat"
    path.write_text("5 6 7\n")
    delay = RunDelay(str(path))
    assert delay.seconds() == pytest.approx(6e-9)
    os.close(delay._fd)
    assert math.isnan(delay.seconds())
