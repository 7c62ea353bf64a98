"""A live process is not taken for a dead one, however its seat is looked at while it is taken."""

import contextlib
import os
import subprocess

import pytest

from unisono.runtime.procfs import started_at
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.external import ExternallyLaunched
from unisono.runtime.workers.meeting_point import Departure, MeetingSeat
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
