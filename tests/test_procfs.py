"""What is read of the kernel's files."""

import pytest

from unisono.runtime.procfs import (
    ProcessStat,
    ThreadTimes,
    field,
    parse_groups,
    parse_stat,
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
