"""What a run on devices says of their memory is in report and live view; on CPUs nothing is."""

import pytest
from tests.report.lines import history_of, status_of, step, workers
from tests.report.synthetic import BEGAN_UNIX_S, start_line, to_bytes
from tests.report.test_drawing import drawn

from unisono.report import document, memory_page
from unisono.report.events import read_event
from unisono.report.memory_use import MAX_WORKERS, MemoryUse, Sizes
from unisono.report.page import report
from unisono.report.process_status import UNKNOWN
from unisono.report.status import worker_lines
from unisono.report.view import see

GB = 10**9


def told(number, *sizes, ranks=(0, 1), at_s=None):
    """A step whose line tells of memory; `sizes` are (allocated, reserved, peak) of each rank."""
    columns = zip(*sizes, strict=True) if sizes else ((), (), ())
    names = ("allocated_bytes", "reserved_bytes", "peak_bytes")
    change = {name: list(column) for name, column in zip(names, columns, strict=True)}
    return step(number, number if at_s is None else at_s, ranks=ranks, **change)


def use_of(*lines, **start):
    made = MemoryUse()
    made.start(read_event(to_bytes(start_line(**start))))
    for line in lines:
        made.add(read_event(to_bytes(line)))
    return made


def test_each_worker_has_its_last_and_its_most():
    made = use_of(told(0, (3, 6, 5), (1, 2, 1)), step(1, 1), told(2, (2, 7, 5), (None, None, None)))
    assert made.last == {0: Sizes(2, 7, 5), 1: Sizes(1, 2, 1)}
    assert made.most == {0: Sizes(3, 7, 5), 1: Sizes(1, 2, 1)}


def test_over_the_run_the_worker_counts_that_takes_most():
    made = use_of(told(0, (3, 6, 5), (4, 2, 1)), told(9, (2, 7, 5), (1, 1, 8)))
    assert {name: [v.high for v in s.values] for name, s in made.over_steps.items()} == {
        "allocated": [4, 2],
        "reserved": [6, 7],
        "peak": [5, 8],
    }
    assert [v.first_step for v in made.over_steps["peak"].values] == [0, 9]


@pytest.mark.parametrize("size", [None, "many", -3, True, 1.5])
def test_a_device_of_no_known_size_has_none(size):
    assert use_of(machine={"device_bytes": size}).device_bytes is None


def test_no_more_workers_are_kept_than_are_shown():
    ranks = range(MAX_WORKERS + 3)
    made = use_of(told(0, *[(1, 2, 3)] * len(ranks), ranks=ranks))
    assert (len(made.last), made.num_left_out) == (MAX_WORKERS, 3)
    assert list(memory_page.rows(made))[-1][0] == "3 more workers"


def test_a_column_of_another_length_makes_a_line_unreadable():
    line = {**told(0, (1, 2, 3), (1, 2, 3)), "peak_bytes": [1]}
    with pytest.raises(ValueError, match="not one entry"):
        read_event(to_bytes(line))


@pytest.mark.parametrize(
    ("peak", "device", "words"),
    [
        (2 * GB, None, "Tensors took at most 2 GB, on worker 1."),
        (2 * GB, 8 * GB, "That is 25% of the 8 GB of its device."),
        (7.9 * GB, 8 * GB, "Little is left"),
    ],
)
def test_the_greatest_peak_is_said(peak, device, words):
    made = use_of(told(0, (1, 2, GB), (1, 2, int(peak))), machine={"device_bytes": device})
    assert words in memory_page.in_words(made)
    assert ("Little" in memory_page.in_words(made)) == ("Little" in words)


@pytest.fixture
def small_library(monkeypatch):
    monkeypatch.setattr(document, "_plotly", lambda: "/* plotly */")


def test_the_report_has_a_section(small_library):
    page = report(history_of(start_line(), told(0, (2 * GB, 3 * GB, GB), (GB, GB, 4 * GB))))
    assert "<h2>Memory of the devices</h2>" in page
    assert "<td>4 GB</td>" in page
    assert '"text":"GB"' in page


def test_the_report_of_a_run_on_cpus_has_none(small_library):
    page = report(history_of(start_line(), step(0, 0)))
    assert "Memory of" not in page


def test_the_live_view_has_columns():
    made = status_of(start_line(), told(0, (2 * GB, 3 * GB, 4 * GB), (GB, GB, GB)), step(1, 1))
    lines = drawn(see(made, {}, BEGAN_UNIX_S + 2), 120)
    assert lines[3].split()[-3:] == ["device", "kept", "most"]
    assert lines[4].split()[-6:] == ["2", "GB", "3", "GB", "4", "GB"]
    narrow = drawn(see(made, {}, BEGAN_UNIX_S + 2), 80)
    assert max(map(len, narrow)) <= 80
    assert "device" in narrow[3]


def test_the_live_view_of_a_run_on_cpus_has_none():
    made = status_of(start_line(), step(0, 0), step(1, 1))
    assert "device" not in "".join(drawn(see(made, {}, BEGAN_UNIX_S + 2), 200))


def test_whoever_comes_anew_takes_nothing_yet():
    made = status_of(
        start_line(), told(0, (2, 3, 4), (1, 1, 1)), workers(1, ranks=[0, 1], lost=[1], joined=[1])
    )
    assert [line.device for line in worker_lines(made, {0: UNKNOWN})] == [None, None]
