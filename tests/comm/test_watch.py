"""A live process is not taken for a dead one, however its seat is looked at while it is taken."""

import contextlib
import os
import subprocess

import pytest

from unisono.comm.control import ControlPage, Departure
from unisono.comm.proc import started_at
from unisono.comm.watch import Watch


class TakenInBetween:
    """The page's numbers, for a reader that is held up after the first one it reads of a seat."""

    def __init__(self, longs, take_seat):
        self._longs, self._take_seat = longs, take_seat

    def __getitem__(self, index):
        value = self._longs[index]
        take_seat, self._take_seat = self._take_seat, lambda: None
        take_seat()
        return value

    def __setitem__(self, index, value):
        self._longs[index] = value


@pytest.fixture
def page():
    with contextlib.closing(ControlPage.create(2)) as page:
        yield page


@pytest.fixture
def watch(page):
    with contextlib.closing(Watch(page, 0)) as watch:
        yield watch


def test_a_seat_is_never_told_by_half(page):
    page._longs = TakenInBetween(page._longs, lambda: page.set_process(1, 7, 8))
    assert page.process(1) in [(0, 0), (7, 8)]
    assert page.process(1) == (7, 8)


def test_who_is_just_sitting_down_is_not_taken_for_dead(page, watch):
    with subprocess.Popen(["sleep", "600"]) as other, contextlib.ExitStack() as at_last:
        at_last.callback(other.kill)
        started = started_at(other.pid)
        page._longs = TakenInBetween(page._longs, lambda: page.set_process(1, other.pid, started))
        watch.look()
        assert page.departure(1) == Departure.PRESENT
        watch.look()
        assert page.departure(1) == Departure.PRESENT
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        watch.look()
    assert page.departure(1) == Departure.DIED


def test_who_has_died_before_it_was_seen_is_marked(page, watch):
    with subprocess.Popen(["true"]) as other:
        page.set_process(1, other.pid, 1)  # no process of ours began with the machine
    watch.look()
    assert page.departure(1) == Departure.DIED


def test_without_descriptors_a_death_is_seen_too(page, watch, monkeypatch):
    def fail(pid):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    with subprocess.Popen(["sleep", "600"]) as other, contextlib.ExitStack() as at_last:
        at_last.callback(other.kill)
        page.set_process(1, other.pid, started_at(other.pid))
        watch.look()
        watch.look()
        assert page.departure(1) == Departure.PRESENT
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        watch.look()
    assert page.departure(1) == Departure.DIED
