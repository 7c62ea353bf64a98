"""What a run comes to: who works, how far it is, how it ended; the same for all who read it."""

import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.report.lines import event, step, workers
from tests.report.synthetic import start_line, to_bytes

from unisono.tools.report.run_progress import (
    GONE,
    UNKNOWN,
    Named,
    RunProgress,
    processes_of,
    said_of,
)
from unisono.training.events.events import End, Failure, read_event


def events(lines):
    return [read_event(to_bytes(line)) for line in lines]


def progress(*lines):
    made = RunProgress()
    for one in events(lines):
        made.add(one)
    return made


def failure(number, rank=1, error="A"):
    return event("failure", number, rank=rank, error=error, message="m")


# What each event leaves: steps done, who computes, who is missing.
@pytest.mark.parametrize(
    ("lines", "num_done", "ranks", "lost"),
    [
        ([start_line()], 0, (0, 1), set()),
        ([start_line(step=250)], 250, (0, 1), set()),
        ([start_line(), step(7, 1)], 8, (0, 1), set()),
        ([start_line(), workers(5, ranks=[0], lost=[1])], 0, (0,), {1}),
        (
            [
                start_line(),
                workers(5, ranks=[0], lost=[1]),
                workers(9, ranks=[0, 1], joined=[1]),
            ],
            0,
            (0, 1),
            set(),
        ),
        ([start_line(), workers(5, ranks=[0], lost=[1]), start_line(step=5)], 5, (0, 1), set()),
        ([start_line(), step(7, 1), event("went_back", 3, from_step=8)], 3, (0, 1), set()),
        ([start_line(), step(7, 1), event("end", 8)], 8, (0, 1), set()),
        ([start_line(), step(7, 1, ranks=[0])], 8, (0,), set()),
        ([start_line(), {"event": "step", "step": 7}], 8, (0, 1), set()),
    ],
)
def test_who_works_and_how_far_it_is(lines, num_done, ranks, lost):
    made = progress(*lines)
    assert (made.num_done, made.ranks, made.lost) == (num_done, ranks, lost)


def test_who_was_lost_is_counted_over_all_fits():
    lost = workers(5, ranks=[0], lost=[1])
    assert progress(start_line(), lost, start_line(step=5), lost).num_lost == 2


@pytest.mark.parametrize(
    ("lines", "kind", "error"),
    [
        ([failure(7), failure(7, rank=0, error="B")], Failure, "A"),  # the first word counts
        ([failure(7), step(7, 2)], None, None),  # a replacement failed, and the others go on
        ([failure(7), step(7, 2), failure(8, error="B")], Failure, "B"),
        ([failure(7), event("end", 8)], End, None),
        ([event("end", 8)], End, None),
        ([event("end", 8), start_line(step=8)], None, None),
        ([event("end", 8), failure(8)], Failure, "A"),
        ([event("interrupted", 8, by="SIGINT"), start_line(step=8)], None, None),
    ],
)
def test_how_it_ended(lines, kind, error):
    ended = progress(start_line(), *lines).ended
    assert isinstance(ended, kind or type(None))
    assert getattr(ended, "error", None) == error


def test_a_pause_between_two_fits_is_no_time_of_them():
    made = progress(
        start_line(time_unix_s=100.0),
        {**step(0, 0), "time_unix_s": 101.0},
        {**step(1, 0), "time_unix_s": "nan"},
        start_line(step=1, time_unix_s=500.0),
        {**step(2, 0), "time_unix_s": 501.5},
    )
    assert made.seconds == 2.5
    assert (made.began_unix_s, made.last_unix_s) == (100.0, 501.5)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            start_line(step=3, num_workers=1),
            "started again at step 3 on 1 worker",
        ),
        (start_line(step=3, world_size=None), "started again at step 3"),
        (workers(3, ranks=[0], lost=[1], why=["x", "y"]), "x; y"),
        (workers(3, ranks=[0], lost=[1]), "worker 1 was lost"),
        (workers(3, ranks=[0, 1], joined=[1]), "worker 1 has joined"),
        (workers(3, ranks=[0]), "the workers have changed"),
        (event("went_back", 3), "went back to step 3"),
        (
            event("went_back", 3, from_step=5),
            "went back to step 3 from step 5: 2 were repeated, with the same result",
        ),
        (event("failure", 3, rank=1, error="E", message="m"), "worker 1: E: m"),
        (event("failure", 3, error="E", message="m"), "E: m"),
        (event("end", 3, stopped_early=True), "stopped early after 3 steps"),
    ],
)
def test_what_happens_once_is_told(line, text):
    assert said_of(read_event(to_bytes(line))) == text


LATER_UNIX_S = 4e9


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def look(pid, at_unix_s=LATER_UNIX_S):
    return processes_of({3: Named(pid, at_unix_s)})[3]


def comes_to(pid, state):
    until_s = time.monotonic() + 10
    while look(pid).state != state and time.monotonic() < until_s:
        time.sleep(0.01)
    return look(pid)


def test_a_process_is_seen_until_it_has_ended(child):
    assert look(child.pid).state == "running"
    child.send_signal(signal.SIGSTOP)
    assert comes_to(child.pid, "stopped").memory_bytes > 0
    child.kill()
    assert comes_to(child.pid, "gone") == GONE  # nobody has waited for it
    child.wait()
    assert look(child.pid) == GONE


def test_a_process_that_began_after_it_was_named_is_another(child):
    began_unix_s = psutil.Process(child.pid).create_time()
    assert look(child.pid, began_unix_s - 1.9).state == "running"
    assert look(child.pid, began_unix_s - 2.1) == GONE


@pytest.mark.parametrize("pid", [2**22 + 1, 2**53])
def test_a_process_that_is_not_there_is_gone(pid):
    assert look(pid) == GONE


def test_nobody_is_called_gone_where_processes_are_hidden(monkeypatch):
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: False)
    assert look(2**22 + 1) == UNKNOWN
