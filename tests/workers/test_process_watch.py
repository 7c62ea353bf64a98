"""A live process is not taken for a dead one, however its seat is looked at while it is taken."""

import contextlib
import os
import subprocess

import pytest

from unisono.workers.control_block import ControlBlock, Departure
from unisono.workers.proc import started_at
from unisono.workers.process_watch import ProcessWatch


class TakenInBetween:
    """A rank's line, for a reader that is held up after the first number it reads of a seat."""

    def __init__(self, line, take_seat):
        vars(self).update(line=line, take_seat=take_seat)

    def __getattr__(self, name):
        value = getattr(self.line, name)
        take_seat, vars(self)["take_seat"] = self.take_seat, lambda: None
        take_seat()
        return value

    def __setattr__(self, name, value):
        setattr(self.line, name, value)


@pytest.fixture
def control():
    with contextlib.closing(ControlBlock.create(2)) as control:
        yield control


@pytest.fixture
def watch(control):
    with contextlib.closing(ProcessWatch(control, 0)) as watch:
        yield watch


def test_a_seat_is_never_told_by_half(control):
    control.lines[1] = TakenInBetween(control.lines[1], lambda: control.set_process(1, 7, 8))
    assert control.process(1) in [(0, 0), (7, 8)]
    assert control.process(1) == (7, 8)


def test_who_is_just_sitting_down_is_not_taken_for_dead(control, watch):
    with subprocess.Popen(["sleep", "600"]) as other, contextlib.ExitStack() as at_last:
        at_last.callback(other.kill)
        started = started_at(other.pid)
        control.lines[1] = TakenInBetween(
            control.lines[1], lambda: control.set_process(1, other.pid, started)
        )
        watch.look()
        assert control.departure(1) == Departure.PRESENT
        watch.look()
        assert control.departure(1) == Departure.PRESENT
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        watch.look()
    assert control.departure(1) == Departure.DIED


def test_who_has_died_before_it_was_seen_is_marked(control, watch):
    with subprocess.Popen(["true"]) as other:
        control.set_process(1, other.pid, 1)  # no process of ours began with the machine
    watch.look()
    assert control.departure(1) == Departure.DIED


def test_without_descriptors_a_death_is_seen_too(control, watch, monkeypatch):
    def fail(pid):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    with subprocess.Popen(["sleep", "600"]) as other, contextlib.ExitStack() as at_last:
        at_last.callback(other.kill)
        control.set_process(1, other.pid, started_at(other.pid))
        watch.look()
        watch.look()
        assert control.departure(1) == Departure.PRESENT
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        watch.look()
    assert control.departure(1) == Departure.DIED
