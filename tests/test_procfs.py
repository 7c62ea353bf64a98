"""What is read of the kernel's files and of real processes, and what a parent's end does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.descriptors import none_stay_open

from unisono.runtime.procfs import (
    NotThereError,
    ProcessStat,
    ThreadTimes,
    die_with,
    field,
    open_memory,
    parse_groups,
    parse_stat,
    started_at,
    thread_times,
)


def stat_line(*, name="python", started=5_000):
    numbers = [0] * 22
    numbers[0], numbers[18] = 7, started
    return f"71 ({name}) S " + " ".join(map(str, numbers))


@pytest.mark.parametrize("name", ["a) R 1 (b", ") (", "\x1b[31m", "two words"])
def test_a_name_does_not_shift_what_follows_it(name):
    assert parse_stat(stat_line(name=name)) == ProcessStat("S", 5_000, 7)


@pytest.mark.parametrize("text", ["", "71", "71 (x", "71 (x) S 1 2", stat_line()[:40]])
def test_what_is_no_stat_line_is_none(text):
    assert parse_stat(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("VmRSS:\t 1000 kB\nName:\tpython\n", 1000),
        *((text, None) for text in ("", "VmRSS:\n", "VmRSS: x kB\n", "VmRSS: -1 kB\n", "\x00")),
    ],
)
def test_memory_is_read_where_it_is_told(text, number):
    assert field(text, "VmRSS:") == number


def test_control_groups_are_read_by_controller():
    assert parse_groups("3:cpu,cpuacct:/a:b\n0::/\n") == {"cpu": "/a:b", "cpuacct": "/a:b", "": "/"}


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("5 6 7\n", ThreadTimes(5, 6)),
        ("0 0 0\n", ThreadTimes(0, 0)),
        ("", None),
        ("1 2", None),
        ("a b c", None),
    ],
)
def test_what_the_kernel_counts_of_a_thread_is_read(text, times, tmp_path):
    (tmp_path / "schedstat").write_text(text)
    assert thread_times(tmp_path) == times
    assert thread_times(tmp_path / "gone") is None


@pytest.fixture
def memory():
    fd = os.memfd_create("unisono-test")
    os.ftruncate(fd, 4096)
    yield fd
    os.close(fd)


def test_one_that_has_ended_has_no_start():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(ended.pid) is None  # nobody has asked for its exit status yet
    ended.wait()
    assert started_at(ended.pid) is None


@pytest.mark.parametrize(
    ("pid", "fd", "name", "size", "words"),
    [
        (None, None, "unisono-other", 4096, "is not the expected memory"),
        (None, None, "unisono-test", 8192, "is memory of another size"),
        (None, 0, "unisono-test", 4096, "is not the expected memory"),
        (None, 99_999, "unisono-test", 4096, "cannot be opened .No such file"),
        (2**22 + 1, 3, "unisono-test", 4096, "cannot be opened .No such file"),
    ],
)
def test_what_is_something_else_is_not_opened(memory, pid, fd, name, size, words):
    with none_stay_open(), pytest.raises(NotThereError, match=words):
        open_memory(pid or os.getpid(), memory if fd is None else fd, name, size)


def test_a_fork_that_was_stopped_before_it_asked_is_told_that_its_parent_is_gone():
    """No signal is sent any more: it leaves by itself as soon as it is continued."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            parent = os.getpid()
            if (child := os.fork()) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                os.write(writing, b"there" if die_with(parent) else b"gone")
            else:
                os.waitid(os.P_PID, child, os.WSTOPPED)
                os.write(writing, b"%d " % child)
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(parent, 0)
    with os.fdopen(reading, "rb") as pipe:
        child, _, said = pipe.read1(64).partition(b" ")
        assert said == b""  # it is still stopped
        os.kill(int(child), signal.SIGCONT)
        assert pipe.read() == b"gone"
