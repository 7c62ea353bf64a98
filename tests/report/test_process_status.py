"""What is believed of a process number, and what is read of its process."""

import os

import pytest

from unisono.procfs import ProcessStat, parse_kilobytes, parse_stat
from unisono.report.process_status import GONE, UNKNOWN, Named, Processes, ProcessState

BOOTED_UNIX_S = 1_790_000_000.0
STATUS = "Name:\tpython\nVmPeak:\t 900 kB\nVmHWM:\t 2000 kB\nVmRSS:\t 1000 kB\nRssAnon:\t 5 kB\n"


def stat_line(*, pid=71, name="python", letter="S", cpu=40, started=5_000):
    numbers = [0] * 22
    numbers[0], numbers[10], numbers[11], numbers[18] = 7, cpu - 10, 10, started
    return f"{pid} ({name}) {letter} " + " ".join(map(str, numbers))


class Kernel:
    """A /proc made up, with a hundred ticks a second."""

    def __init__(self, root):
        self.root, self.now_s = root, 100.0
        self.put(1)

    def put(self, pid, status=STATUS, **stat):
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(stat_line(pid=pid, **stat))
        (folder / "status").write_text(status)

    def processes(self):
        return Processes(
            self.root, lambda: self.now_s, lambda: BOOTED_UNIX_S + self.now_s, ticks_per_s=100
        )


@pytest.fixture
def kernel(tmp_path):
    return Kernel(tmp_path)


def look(processes, pid=71, at_s=60.0):
    return processes.look({3: Named(pid, BOOTED_UNIX_S + at_s)})[3]


@pytest.mark.parametrize(
    ("letter", "state"),
    [
        ("R", ProcessState.RUNNING),
        ("S", ProcessState.RUNNING),
        ("D", ProcessState.RUNNING),
        ("T", ProcessState.STOPPED),
        ("t", ProcessState.STOPPED),
        ("Z", ProcessState.GONE),
        ("X", ProcessState.GONE),
    ],
)
def test_what_a_letter_means(kernel, letter, state):
    kernel.put(71, letter=letter)
    process = look(kernel.processes())
    assert process.state is state
    assert process.waits_for_disk == (letter == "D")


@pytest.mark.parametrize(
    ("started_s", "state"),
    [
        (50, ProcessState.RUNNING),
        (60, ProcessState.RUNNING),
        (61.9, ProcessState.RUNNING),
        (62.1, ProcessState.GONE),
    ],
)
def test_a_process_that_began_after_it_was_named_is_another(kernel, started_s, state):
    kernel.put(71, started=int(started_s * 100))
    assert look(kernel.processes()).state is state


def test_memory_is_read(kernel):
    kernel.put(71)
    process = look(kernel.processes())
    assert (process.memory_bytes, process.peak_bytes) == (1000 * 1024, 2000 * 1024)


def test_processor_time_is_seen_from_two_looks(kernel):
    kernel.put(71, cpu=40)
    processes = kernel.processes()
    assert look(processes).cpu is None
    kernel.now_s += 0.5
    kernel.put(71, cpu=65)
    assert look(processes).cpu == pytest.approx(0.5)
    for _ in range(10):  # what was long ago is of no account
        kernel.now_s += 0.5
        assert look(processes).cpu is not None
    assert look(processes).cpu == 0


def test_processor_time_of_another_process_is_not_counted(kernel):
    kernel.put(71, cpu=4000, started=10)
    processes = kernel.processes()
    look(processes)
    kernel.now_s += 1
    kernel.put(71, cpu=20, started=2000)
    assert look(processes).cpu is None


def test_a_process_that_is_not_there_is_gone(kernel):
    assert look(kernel.processes(), pid=72) == GONE
    assert look(kernel.processes(), pid=2**53) == GONE


def test_nobody_is_called_gone_where_processes_are_hidden(kernel, tmp_path):
    empty = tmp_path / "hidden"
    empty.mkdir()
    assert look(Processes(empty)) == UNKNOWN


def test_this_process_is_found():
    found = Processes().look({0: Named(os.getpid(), 4e9)})[0]
    assert found.state is ProcessState.RUNNING
    assert 0 < found.memory_bytes <= found.peak_bytes


@pytest.mark.parametrize("name", ["a) R 1 (b", ") (", "\x1b[31m", "two words"])
def test_a_name_does_not_shift_what_follows_it(name):
    assert parse_stat(stat_line(name=name)) == ProcessStat("S", 40, 5_000, 7)


@pytest.mark.parametrize("text", ["", "71", "71 (x", "71 (x) S 1 2", stat_line(cpu=40)[:40]])
def test_what_is_no_stat_line_is_none(text):
    assert parse_stat(text) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("VmRSS:\t 1000 kB\nName:\tpython\n", {"VmRSS": 1000 * 1024}),
        ("MemTotal:  10 kB\nHugePages_Total: 3\n\nMemFree: x kB\n", {"MemTotal": 10240}),
        *((text, {}) for text in ("", "VmRSS:\n", "VmRSS: x kB\n", "VmRSS: -1 kB\n", "\x00")),
    ],
)
def test_memory_is_read_where_it_is_told(text, found):
    assert parse_kilobytes(text) == found
