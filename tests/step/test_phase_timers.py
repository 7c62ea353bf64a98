"""The seconds of a step's phases add up."""

from unisono.engine.step import records as phase_timers
from unisono.engine.step.records import Phase, PhaseTimers


def test_phases_add_up(monkeypatch):
    now_s = [5.0]
    monkeypatch.setattr(phase_timers, "perf_counter", lambda: now_s[0])
    timers = PhaseTimers()
    for begun_s in (5.0, 6.5):
        timers.begin()
        for phase in (Phase.LOADING, Phase.FORWARD, Phase.LOADING):
            now_s[0] += 0.5
            timers.lap(phase)
        assert timers.times == [begun_s, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
