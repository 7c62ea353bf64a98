"""Who has stopped moving, by tables, and what the kernel says of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from tests.launch.conftest import ALL, PIDS, Kernel
from tests.promises import promise

from unisono.runtime.launch.stall_watch import (
    LOOK_EVERY_S,
    Observation,
    StallWatch,
    compare,
    processor_time,
)
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.membership import Membership

FREE, AWAITED, STOPPED = (False, False), (False, True), (True, False)


def looks(*sights: tuple[int, tuple[bool, bool]], passed_s: float = 1.0) -> float:
    """Look at one worker again and again; say how long it has not moved."""
    watched: dict[int, Observation] = {}
    for beat, how in sights:
        watched = compare(watched, {0: Observation((beat,), *how)}, passed_s)
    return watched[0].quiet_s


@promise("where-it-ends.8")
@pytest.mark.parametrize(
    ("sights", "quiet_s"),
    [
        ([(5, AWAITED)], 0.0),  # nobody knows yet whether it moves
        ([(5, AWAITED), (5, AWAITED)], 1.0),
        ([(5, AWAITED)] * 4, 3.0),
        ([(5, STOPPED)] * 4, 3.0),
        ([(5, (True, True))] * 4, 3.0),
        ([(5, FREE)] * 4, 0.0),  # nobody waits for it: it may sleep
        ([(5, AWAITED), (6, AWAITED)], 0.0),
        ([(5, AWAITED), (5, AWAITED), (6, AWAITED)], 0.0),
        ([(5, AWAITED), (5, AWAITED), (6, AWAITED), (6, AWAITED)], 1.0),
        ([(5, FREE), (5, FREE), (5, AWAITED)], 1.0),  # counted from when others waited
        ([(5, AWAITED), (5, AWAITED), (5, FREE), (5, AWAITED)], 1.0),
        ([(5, AWAITED), (5, STOPPED), (5, AWAITED)], 2.0),
        ([(5, AWAITED), (4, AWAITED)], 0.0),  # another process has the rank now
    ],
)
def test_only_one_that_holds_others_up_and_does_not_move_is_quiet(
    sights: list[tuple[int, tuple[bool, bool]]], quiet_s: float
) -> None:
    assert looks(*sights) == quiet_s


@pytest.mark.parametrize(
    ("passed_s", "counted_s"),
    [
        (0.0, 0.0),
        (LOOK_EVERY_S, LOOK_EVERY_S),
        (2 * LOOK_EVERY_S, 2 * LOOK_EVERY_S),
        (2 * LOOK_EVERY_S + 0.1, 2 * LOOK_EVERY_S),
        (8 * 3600.0, 2 * LOOK_EVERY_S),
    ],
)
def test_time_in_which_the_launcher_was_suspended_does_not_count(
    passed_s: float, counted_s: float
) -> None:
    assert looks((5, STOPPED), (5, STOPPED), passed_s=passed_s) == counted_s


# The kernel's word.


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_stopped_process_is_seen_to_be_and_does_not_run(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    first = processor_time(child.pid)
    assert first is not None
    assert first[1]
    assert processor_time(child.pid) == first
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    second = processor_time(child.pid)
    assert second is not None
    assert not second[1]


def test_a_process_that_computes_is_seen_to_run() -> None:
    before = processor_time(os.getpid())
    assert before is not None
    while True:  # the kernel counts at its ticks
        after = processor_time(os.getpid())
        assert after is not None
        assert not after[1]
        if after[0] > before[0]:
            break
    assert processor_time(2**22 + 1) is None


# The watch.


def seen_in(
    watch: StallWatch, kernel: Kernel, num_looks: int, membership: Membership | None
) -> list[int]:
    found = []
    for _ in range(num_looks):
        kernel.now_s += LOOK_EVERY_S
        found += [stalled.rank for stalled in watch.poll(PIDS, membership)]
    return found


def test_who_holds_the_others_up_is_found_and_told(page: ControlBlock, kernel: Kernel) -> None:
    watch = StallWatch(page, 3.0)
    kernel.processes = dict.fromkeys(PIDS.values(), (5, False))
    page.lines[0].arrive()
    page.lines[1].arrive()
    page.lines[2].begun = 42
    assert seen_in(watch, kernel, 3, ALL) == []
    kernel.now_s += LOOK_EVERY_S
    ((rank, message, how),) = watch.poll(PIDS, ALL)
    assert (rank, how) == (2, "was ended, as it stood still for 3 s")
    assert message == (
        "worker 2 (pid 12) must move while others wait for it, but has not for 3 s in step 41: it "
        "waits for something that does not come: a lock, a file, a network. It is ended; "
        "`--stall-timeout` or `stall_timeout_s` says after how many seconds."
    )
    assert seen_in(watch, kernel, 3, ALL) == []  # it was told; its end is under way


def test_one_that_a_signal_has_stopped_is_told_so(page: ControlBlock, kernel: Kernel) -> None:
    watch = StallWatch(page, 1.0)
    kernel.processes = {10: (5, False), 11: (5, True), 12: (5, False)}
    assert seen_in(watch, kernel, 1, ALL) == []
    kernel.now_s += LOOK_EVERY_S
    ((rank, message, _),) = watch.poll(PIDS, ALL)
    assert rank == 1
    assert "a signal has stopped it (SIGSTOP, or a debugger)" in message


@promise("where-it-ends.8")
def test_those_who_wait_and_those_who_compute_are_left_alone(
    page: ControlBlock, kernel: Kernel
) -> None:
    watch = StallWatch(page, 1.0)
    page.lines[0].arrive()
    page.lines[1].arrive()
    for ran_ns in range(10):
        kernel.processes = {10: (5, False), 11: (5, False), 12: (ran_ns, False)}
        assert seen_in(watch, kernel, 1, ALL) == []


@pytest.mark.parametrize(
    ("membership", "found"),
    [
        (ALL, [2]),
        (Membership((0, 2), leader=0), [2]),
        (Membership((1, 2), leader=1), []),  # who has come further has no part in it
        (Membership((0, 1), leader=0), [1]),
        (None, []),
    ],
)
def test_only_the_crew_waits_for_each_other(
    page: ControlBlock, kernel: Kernel, membership: Membership | None, found: list[int]
) -> None:
    watch = StallWatch(page, 2.0)
    kernel.processes = dict.fromkeys(PIDS.values(), (5, False))
    page.lines[0].arrive()
    if found == [2]:
        page.lines[1].arrive()
    assert seen_in(watch, kernel, 3, membership) == found


def test_meetings_are_counted_past_the_end_of_32_bits(page: ControlBlock, kernel: Kernel) -> None:
    watch = StallWatch(page, 2.0)
    kernel.processes = dict.fromkeys(PIDS.values(), (5, False))
    page.mark_replaced(0, 0)
    page.mark_replaced(1, 0)
    page.mark_replaced(2, 2**32 - 1)
    assert seen_in(watch, kernel, 3, ALL) == [2]


def test_a_replacement_does_not_inherit_the_silence_of_the_one_before(
    page: ControlBlock, kernel: Kernel
) -> None:
    watch = StallWatch(page, 3.0)
    kernel.processes = {11: (5, True), 21: (5, True)}
    assert seen_in(watch, kernel, 3, ALL) == []
    kernel.now_s += LOOK_EVERY_S
    assert watch.poll({1: 21}, ALL) == []
