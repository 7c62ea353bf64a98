"""What the launcher takes for a wait, and when it speaks; clock and processes are the test's."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.promises import promise

from unisono.runtime.hangs.explanation import Hang
from unisono.runtime.launch import hang_watch
from unisono.runtime.launch.hang_watch import LOOK_EVERY_S, HangWatch, Scene
from unisono.runtime.workers.control_block import NUM_TIMES, ControlBlock

PIDS = {0: 10, 1: 11}
ALL = (0, 1)


class Bench:
    """A watch, the time, and how long processes have run.

    Attributes:
        said: at which time, and for which wait the thread has looked.
    """

    def __init__(self, control: ControlBlock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.control, self.now_s = control, 100.0
        self.ran_ns = dict.fromkeys(PIDS.values(), 0)
        self.busy = set(PIDS.values())
        self.said: list[float] = []
        self.hangs: list[Hang] = []
        self.text = "told"
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(hang_watch, "time", clock)
        monkeypatch.setattr(hang_watch, "thread_time_ns", lambda pid: self.ran_ns[pid])
        monkeypatch.setattr(hang_watch, "inspect_ranks", lambda *_, **how: [])
        monkeypatch.setattr(hang_watch, "explain", self._explain)
        self.watch = HangWatch(control, "/work", lambda text: self.said.append(self.now_s))

    def _explain(self, looks: object, hang: Hang) -> str:
        self.hangs.append(hang)
        return self.text

    def run(self, seconds: float, scene: Scene | None = None) -> list[float]:
        """Let time pass; tell when words were said, in seconds from now."""
        began_s, before = self.now_s, len(self.said)
        for _ in range(round(seconds / LOOK_EVERY_S)):
            self.now_s += LOOK_EVERY_S
            for pid in self.busy:
                self.ran_ns[pid] += int(LOOK_EVERY_S * 1e9)
            self.watch.poll(scene or Scene(PIDS, ALL))
            self.watch.close()
        return [at_s - began_s for at_s in self.said[before:]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    control = ControlBlock.create(2)
    yield Bench(control, monkeypatch)
    control.close()


def step(bench: Bench, number: int) -> None:
    """Begin a step on both ranks."""
    for rank in ALL:
        bench.control.lines[rank].begun = number + 1


def test_one_that_waits_at_a_meeting_is_told_of_after_three_seconds(bench: Bench) -> None:
    bench.run(2)
    bench.control.lines[0].arrive()
    assert bench.run(20) == [4.0, 7.0, 13.0]
    assert [round(hang.waited_s or 0) for hang in bench.hangs] == [3, 6, 12]
    bench.control.lines[1].arrive()
    assert bench.run(20) == []


def test_a_wait_that_ended_before_the_answer_is_not_told_of(bench: Bench) -> None:
    bench.control.lines[0].arrive()
    bench.run(3.5)
    assert len(bench.hangs) == 1
    bench.control.lines[1].arrive()
    assert bench.run(2) == []


def test_where_steps_are_slow_more_is_waited_for(bench: Bench) -> None:
    for number in range(10):
        step(bench, number)
        assert bench.run(1) == []
    bench.control.lines[0].arrive()
    assert bench.run(20) == [11.0]
    assert bench.hangs[0].usual_s == pytest.approx(1.0)


@promise("where-it-ends.8", "nothing-lost.3")
def test_a_step_that_takes_long_is_told_of_though_nobody_waits(bench: Bench) -> None:
    for number in range(10):
        step(bench, number)
        bench.run(0.5)
    assert bench.run(8) == [5.5]  # ten times half a second
    for rank in ALL:
        bench.control.set_times(rank, 9, [1.0] * NUM_TIMES)
    assert bench.run(8) == []  # it is over


def test_the_time_before_the_first_step_is_none_of_it(bench: Bench) -> None:
    bench.run(60)
    step(bench, 7)
    bench.run(0.5)
    bench.control.lines[0].arrive()
    assert bench.run(5) == [4.0]
    assert bench.hangs[0].usual_s == pytest.approx(0.5 / 7)


def test_a_first_step_is_not_known_to_be_slow_while_somebody_computes(bench: Bench) -> None:
    step(bench, 0)
    assert bench.run(20) == []
    bench.busy = {10}
    assert bench.run(20) == []
    bench.busy = set()
    assert bench.run(5) == [3.5]


def test_one_that_stands_still_is_looked_at_and_not_told_of_if_it_waits_for_nobody(
    bench: Bench,
) -> None:
    bench.text = ""
    bench.busy = {10}
    assert bench.run(20) == []
    assert [hang.waited_s for hang in bench.hangs] == [3.0, 6.0, 12.0]


def test_one_that_has_shown_its_wait_has_waited_for_a_second(bench: Bench) -> None:
    bench.run(1)
    bench.control.show_wait(0, b"barrier (call 3)")
    assert bench.run(4) == [3.0]
    bench.control.show_wait(0, b"")
    assert bench.run(4) == []


def test_those_outside_of_the_membership_are_not_waited_for(bench: Bench) -> None:
    bench.control.lines[0].arrive()
    assert bench.run(5, Scene(PIDS, (0,))) == []


def test_time_in_which_the_launcher_stood_still_does_not_count(bench: Bench) -> None:
    bench.control.lines[0].arrive()
    bench.run(2)
    bench.now_s += 3600
    assert bench.run(2.5) == []
    assert bench.run(2) == [1.5]


def test_advice_that_fails_ends_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(hang_watch, "inspect_ranks", fail)
    bench.control.lines[0].arrive()
    assert bench.run(5) == [4.0]  # that it cannot be seen
    monkeypatch.setattr(hang_watch, "notes_of", fail)
    assert len(bench.run(5)) == 1
    assert bench.run(5) == []


def test_a_thread_that_cannot_start_ends_the_advice_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(hang_watch._Answer, "start", refuse)
    bench.control.lines[0].arrive()
    assert bench.run(5) == [3.5]  # that no wait is explained any more
    assert bench.watch.due_s == math.inf  # else the launcher's loop would spin


@promise("nothing-lost.3")
@pytest.mark.parametrize(
    ("durations", "long_s"),
    [
        ([], 3.0),
        ([0.003] * 9, 3.0),
        ([0.3], 3.0),
        ([0.31], 3.1),
        ([0.01, 2.0, 2.0], 20.0),
        ([0.01, 0.01, 100.0], 3.0),  # one slow step is not the median
    ],
)
def test_a_wait_is_long_from_ten_times_the_median_on_but_not_before_three_seconds(
    durations: list[float], long_s: float
) -> None:
    assert hang_watch.long_s(durations) == pytest.approx(long_s)
