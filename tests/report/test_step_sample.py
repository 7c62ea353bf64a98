"""Windows of steps are read from event files of any size, and from no line that is not whole."""

import numpy as np
import pytest
from tests.report.synthetic import event, start_line, step_line, to_bytes

from unisono.runtime.plainfile import NotPlainFileError
from unisono.training.events.events import SlowdownCause
from unisono.training.events.slowness import slowdowns_in
from unisono.training.events.step_sample import COLUMNS, WARMUP_STEPS, sample_of

ROW = [0.001, 0.002, 0.004, 0.0005, 0.0003, 0.0002]  # 8 ms
STEP_S = 0.01


def steps(num_steps, *, first=0, ranks=(0, 1), **change):
    for number in range(first, first + num_steps):
        rows = [ROW] * len(ranks)
        begun = [number * STEP_S + rank for rank in ranks]
        yield step_line(number, ranks=[*ranks], phases=rows, begun_s=begun, seconds=0.01, **change)


def written(path, *lines):
    path.write_bytes(b"".join(one if isinstance(one, bytes) else to_bytes(one) for one in lines))
    return path


def sampled(tmp_path, *lines, since_step=0, **options):
    path = written(tmp_path / "events.jsonl", *lines)
    return sample_of(path, since_step=since_step, batch_size=64, **options)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [120, 1500, 20_000])
def test_windows_are_of_consecutive_steps_and_say_what_is_between(tmp_path, num_steps):
    windows = sampled(tmp_path, start_line(), *steps(num_steps)).windows
    assert 2 <= len(windows) <= 12
    for window in windows:
        assert window.ranks == (0, 1)
        assert window.times.shape[1:] == (2, len(COLUMNS))
        assert 24 <= len(window.times) <= 60
        expected = [STEP_S - sum(ROW), *ROW]
        assert np.allclose(window.times, expected, atol=1e-5)


@pytest.mark.parametrize("num_steps", [0, 1, 5, 40])
def test_few_steps_are_no_window(tmp_path, num_steps):
    assert sampled(tmp_path, start_line(), *steps(num_steps)).windows == ()


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [200, 9_000])
def test_a_call_of_fit_has_its_own_steps_alone(tmp_path, num_before):
    """The first steps of each call are slow everywhere, and the call before may have been."""
    before = steps(num_before + WARMUP_STEPS, ranks=(0, 1, 2))
    after = steps(300, first=num_before + WARMUP_STEPS)
    found = sampled(tmp_path, start_line(), *before, *after, since_step=num_before)
    assert {window.ranks for window in found.windows} == {(0, 1)}


def test_the_newest_steps_may_be_read_alone(tmp_path):
    lines = [*steps(1000), *steps(150, first=1000, ranks=(0, 1, 2))]
    assert {one.ranks for one in sampled(tmp_path, *lines, is_newest=True).windows} == {(0, 1, 2)}
    assert {one.ranks for one in sampled(tmp_path, *lines).windows} == {(0, 1), (0, 1, 2)}


def test_short_steps_and_those_after_an_evaluation_are_left_out(tmp_path):
    lines = list(steps(300))
    for number in range(0, 300, 12):
        lines[number]["num_samples"] = 63
        for later in lines[number + 6 :]:
            later["begun_s"] = [begun_s + 5.0 for begun_s in later["begun_s"]]
    windows = sampled(tmp_path, *lines).windows
    assert all(window.times[..., 0].max() < 0.1 for window in windows)
    assert all(len(window.times) <= 34 for window in windows)


def test_delays_are_a_part_of_the_time(tmp_path):
    lines = list(steps(300))
    for number, line in enumerate(lines):
        line["time_unix_s"] = number * STEP_S
        if number % 10 == 0:
            line["delayed_s"] = [7 + number * STEP_S / 4, None]
    assert sampled(tmp_path, *lines).delayed == pytest.approx({0: 0.25})


BROKEN = [
    b"\xff\n",
    b'{"event":"step"\n',
    b'{"event":"step",' + b"[" * 5000 + b"\n",
    {"event": "step"},
    {**next(steps(1)), "ranks": 3},
    {**next(steps(1)), "ranks": [0, 1, 2]},
    {**next(steps(1)), "begun_s": [0.0]},
    {**next(steps(1)), "waiting_s": [0.0, None]},
    {**next(steps(1)), "loading_s": ["x", {}]},
    {**next(steps(1)), "loading_s": [float("nan"), 1e400]},
    {**next(steps(1)), "step": "many"},
    {**next(steps(1)), "delayed_s": 4},
    {**next(steps(1)), "time_unix_s": None},
    event("workers", 3, ranks=[0]),
]


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
def test_a_line_that_is_no_whole_step_only_ends_a_window(tmp_path, line):
    found = sampled(tmp_path, *steps(150), line, *steps(150, first=150))
    assert all(np.isfinite(window.times).all() for window in found.windows)
    assert found.windows
    assert sampled(tmp_path, line) == sampled(tmp_path)


def test_what_a_file_shows_is_judged_as_its_first_line_says(tmp_path):
    lines = list(steps(300))
    for line in lines:
        line["forward_s"], line["waiting_s"] = [0.002, 0.0024], [0.0009, 0.0005]
        line["loading_s"] = [0.001, 0.006]
    path = written(tmp_path / "events.jsonl", *lines)
    start = start_line(shards=2)
    (one,) = (each for each in slowdowns_in(path, start) if each.cause is SlowdownCause.WORKER)
    assert "worker 1 is slow in loading its samples: 6 ms" in one.line
    assert slowdowns_in(path, {**start, "batch_size": None}) is None
    assert slowdowns_in(path, {**start, "step": 250}) is None


def test_what_is_no_plain_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        sample_of(tmp_path / "none", since_step=0, batch_size=1)
    with pytest.raises(NotPlainFileError):
        sample_of(tmp_path, since_step=0, batch_size=1)
