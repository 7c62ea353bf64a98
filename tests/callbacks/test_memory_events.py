"""Lines of steps tell how much memory of their devices the workers take, and on CPUs nothing."""

import json

import pytest
from tests.callbacks.test_event_log import Crew, done

from unisono.callbacks import EventLog, Times
from unisono.training.callbacks import event_log
from unisono.training.callbacks.event_log import step_line
from unisono.training.events.events import read_event

FACTS = {
    "time_unix_s": 1.5,
    "step": 3,
    "epoch": 0,
    "num_samples": 8,
    "seconds": 0.25,
    "means": {"loss": 0.5},
    "learning_rates": [0.1],
    "gradient_norm": None,
    "ranks": (0, 1),
}
TIMES = [Times(*[0.5] * 7), None]


def test_few_lines_have_more():
    line = step_line(FACTS, TIMES, allocated_bytes=[2**40, None], delayed_s=[0.25, None])
    event = read_event(line)
    assert (event.allocated_bytes, event.delayed_s) == ((2**40, None), (0.25, None))


class Devices(Crew):
    """Two workers whose devices take a byte more after each step, on a clock of its own."""

    step = 0

    def __init__(self, *, has_memory):
        self.has_memory = has_memory

    def times(self, rank, step):
        return Times(*[0.0] * 7)

    def memory(self, rank):
        return self.step if self.has_memory else None


def lines_of(tmp_path, monkeypatch, fit, num_steps, seconds):
    now_s = [100.0]
    monkeypatch.setattr(event_log, "perf_counter", lambda: now_s[0])
    log = EventLog(tmp_path / "events.jsonl")
    log.on_begin(fit)
    for number in range(num_steps):
        now_s[0] += seconds
        fit.step = number + 1
        log.on_step_end(fit, done(number))
    log.on_snapshot(fit)
    log.on_error(fit, ValueError("the end"))
    text = (tmp_path / "events.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == "step"]


@pytest.mark.parametrize(("seconds", "told"), [(0.3, [0, 1, 2, 3, 4]), (0.04, [0, 3])])
def test_few_lines_a_second_tell_of_memory(tmp_path, monkeypatch, seconds, told):
    lines = lines_of(tmp_path, monkeypatch, Devices(has_memory=True), 5, seconds)
    assert [line["step"] for line in lines if "allocated_bytes" in line] == told
    assert lines[0]["allocated_bytes"] == [2, 2]


def test_on_cpus_no_line_tells_of_memory(tmp_path, monkeypatch):
    fit = Devices(has_memory=False)
    lines = lines_of(tmp_path, monkeypatch, fit, 5, 0.3)
    assert len(lines) == 5
    assert not any("allocated_bytes" in line for line in lines)
