"""A trace that Perfetto reads: the fields of each kind of event, and slices within slices."""

import json

import pytest
from tests.report.synthetic import run_lines, start_line, to_bytes, write_run

from unisono.report import trace
from unisono.report.events import PHASES, read_event
from unisono.report.files import write_report

# "Trace Event Format": what each kind of event must have.
FIELDS = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "i": {"name", "cat", "ts", "pid", "tid", "s"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
}


def traced(lines, num_left_out=0):
    events = (read_event(to_bytes(line)) for line in lines)
    return json.loads("".join(trace.trace_parts(events, num_left_out=num_left_out)))


def of_kind(found, kind):
    return [one for one in found["traceEvents"] if one["ph"] == kind]


@pytest.fixture(scope="module")
def found():
    return traced(run_lines(num_steps=150, num_workers=3, fails=True))


def test_each_event_has_its_fields(found):
    for one in found["traceEvents"]:
        assert FIELDS[one["ph"]] <= one.keys()
        assert isinstance(one["pid"], int)
        assert all(isinstance(one[key], int | float) for key in ("ts", "dur") if key in one)
        assert one.get("dur", 0) >= 0
    assert {one["s"] for one in of_kind(found, "i")} == {"g"}


def test_each_worker_has_a_named_row(found):
    names = {
        one["pid"]: one["args"]["name"]
        for one in of_kind(found, "M")
        if one["name"] == "process_name"
    }
    assert names == {1: "run", 2: "worker 0", 3: "worker 1", 4: "worker 2"}


def test_phases_lie_within_their_step_one_after_another(found):
    slices = [one for one in of_kind(found, "X") if one["cat"] in ("step", "phase")]
    for pid in (2, 3, 4):
        row = sorted(
            (one for one in slices if one["pid"] == pid), key=lambda one: (one["ts"], -one["dur"])
        )
        end_of_step = end_of_phase = -1.0
        for one in row:
            end = one["ts"] + one["dur"]
            if one["cat"] == "step":
                assert one["ts"] >= end_of_step - 1e-3
                end_of_step, end_of_phase = end, one["ts"]
            else:
                assert one["name"] in PHASES
                assert one["ts"] >= end_of_phase - 1e-3
                assert end <= end_of_step + 1e-3
                end_of_phase = end


def test_times_are_microseconds_since_the_run_began(found):
    first = next(one for one in of_kind(found, "X") if one["name"] == "step 0")
    assert 500_000 <= first["ts"] < 501_000
    assert 9_000 < first["dur"] < 15_000


def test_what_happened_is_marked(found):
    assert [one["name"] for one in of_kind(found, "i")] == [
        "start",
        "checkpoint",
        "worker 1 was killed by SIGKILL",
        "a replacement for worker 1 has come",
        "worker 2: NonFiniteLossError: the loss of step 150 is nan: lower the learning rate",
    ]


def test_a_long_run_keeps_its_end():
    found = traced(run_lines(num_steps=20, num_workers=2), num_left_out=15)
    steps = {one["args"]["step"] for one in of_kind(found, "X") if one["cat"] == "step"}
    assert steps == {15, 16, 17, 18, 19}
    assert found["otherData"]["steps_left_out"] == 15


@pytest.mark.parametrize(
    ("num_steps", "num_workers", "kept"),
    [(100, 2, 100), (10**6, 2, 21428), (10**6, 10**6, 1), (0, 0, 0)],
)
def test_a_trace_holds_what_a_browser_opens(num_steps, num_workers, kept):
    assert trace.num_kept(num_steps, num_workers) == kept


def test_a_run_without_a_step_has_a_trace():
    found = traced([start_line(clock_s=None)])
    assert [one["ph"] for one in found["traceEvents"]] == ["M", "M", "M", "i"]


def test_the_trace_is_written_beside_the_page(tmp_path):
    run = write_run(tmp_path / "run", num_steps=5)
    page, path = write_report(run, trace_file=tmp_path / "trace.json")
    assert (page, path) == (run / "report.html", tmp_path / "trace.json")
    assert json.loads(path.read_text())["displayTimeUnit"] == "ms"


def test_page_and_trace_of_one_name_are_refused_before_anything_is_written(tmp_path):
    run = write_run(tmp_path / "run", num_steps=5)
    (tmp_path / "link").symlink_to(run)
    for output, trace_file in (
        (None, tmp_path / "link" / "report.html"),
        (run / "x", run / ".." / "run" / "x"),
    ):
        with pytest.raises(ValueError, match="`--trace` must name another file than the page"):
            write_report(run, output, trace_file)
    assert [path.name for path in run.iterdir()] == ["events.jsonl"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_page_is_not_written_through_a_link_that_lies_in_the_folder(tmp_path, is_there):
    run, outside = write_run(tmp_path / "run", num_steps=5), tmp_path / "outside"
    if is_there:
        outside.touch()
    (run / "report.html").symlink_to(outside)
    with pytest.raises(ValueError, match="must be a file that this command wrote, but is a link"):
        write_report(run)
    assert outside.exists() == is_there
    assert not is_there or outside.read_bytes() == b""
