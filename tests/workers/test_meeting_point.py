"""A live process is not taken for a dead one, however its seat is looked at while it is taken."""

import contextlib
import math
import os
import subprocess
from types import SimpleNamespace

import pytest

from unisono.errors import WaitTimeoutError
from unisono.runtime.c10d import messages
from unisono.runtime.c10d.messages import Messages
from unisono.runtime.procfs import started_at
from unisono.runtime.workers import meeting_point
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.external import ExternallyLaunched
from unisono.runtime.workers.meeting_point import Departure, MeetingPoint, MeetingSeat
from unisono.runtime.world import World


class TakenInBetween(MeetingSeat):
    """A seat, for a reader that is held up after the first number it reads of it."""

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name in ("pid", "started") and "then" in vars(self):
            vars(self).pop("then")()
        return value


@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "600"]) as other, contextlib.ExitStack() as at_last:
        at_last.callback(other.kill)
        yield other


def test_a_seat_is_never_told_by_half():
    seat = TakenInBetween()
    seat.then = lambda: seat.register(7, 8)
    assert seat.process in [(0, 0), (7, 8)]
    assert seat.process == (7, 8)


def test_who_is_just_sitting_down_is_not_taken_for_dead(child):
    seat, started = TakenInBetween(), started_at(child.pid)
    seat.then = lambda: seat.register(child.pid, started)
    assert not seat.has_died
    assert not seat.has_died
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert seat.has_died


def test_another_launchers_workers_mark_who_has_died_before_it_was_seen():
    with subprocess.Popen(["true"]) as other:
        pass
    with contextlib.closing(ControlBlock.create(3)) as control:
        control.take_seat(0)
        control.lines[1].register(other.pid, 1)  # no process of ours began with the machine
        worker = ExternallyLaunched(World(0, 3, 0, 3), control)
        worker.poll()
        expected = [Departure.PRESENT, Departure.DIED, Departure.PRESENT]
        assert [control.departure(rank) for rank in range(3)] == expected


TIMEOUT_S, STOPPED_S = 1800.0, 3600.0


class Barrier(MeetingPoint):
    """A barrier of two, at which the other arrives once `rests` returns False."""

    def __init__(self, rests):
        super().__init__([MeetingSeat(), MeetingSeat()], 0, [0, 1], math.inf)
        self.rests = rests

    def find_departed(self, missing):
        return []

    def lose(self, rank, how):
        raise AssertionError

    def here(self):
        return "a barrier"

    def last_seen(self, rank):
        return ""

    def rest(self, rank, seen, at_most_s):
        if not self.rests(at_most_s):
            self._seats[1].arrivals = 1

    def wait(self):
        return self.await_others(1, TIMEOUT_S, spins=False)


def receive(rests, monkeypatch):
    """Wait as one who receives a message does, until `rests` returns False."""
    has_come = []
    meeting = SimpleNamespace(spin_s=0.0, find_departed=lambda others: [])
    region = SimpleNamespace(word=lambda word: 0, address=0)
    rank = SimpleNamespace(
        _region=region, _meeting=meeting, _names=[0, 1], _named=lambda others: "rank 1"
    )
    monkeypatch.setattr(
        messages.futex, "wait", lambda word, seen, at_most_s: rests(at_most_s) or has_come.append(1)
    )
    Messages._wait(rank, lambda: bool(has_come), 0, [1], "send", TIMEOUT_S)
    return True


@pytest.mark.parametrize("of", ["barrier", "message"])
def test_time_in_which_the_whole_job_is_stopped_is_not_waited(monkeypatch, of):
    now_s, stops = [0.0], [STOPPED_S, STOPPED_S]
    monkeypatch.setattr(meeting_point, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def rests(at_most_s):
        """Stop the job twice and end the wait; later, rest as long as was asked for."""
        now_s[0] += stops.pop() if stops else at_most_s
        return bool(stops) or now_s[0] > 2 * STOPPED_S

    def wait():
        return Barrier(rests).wait() if of == "barrier" else receive(rests, monkeypatch)

    assert wait()
    with pytest.raises(WaitTimeoutError, match=r"1800\.0 s"):
        wait()
