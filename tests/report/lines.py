"""Single lines of an event file, and how a run stands after some."""

from tests.report.synthetic import BEGAN_UNIX_S, event, step_line, to_bytes

from unisono.tools.report.history import History
from unisono.tools.report.view import RunStatus
from unisono.training.events.events import read_event

# Seconds in each phase; what is not waiting is eight milliseconds.
ROW = [0.001, 0.002, 0.004, 0.002, 0.0005, 0.0005]


def history_of(*lines, name=""):
    made = History(name)
    made.add(read_event(to_bytes(line)) for line in lines)
    return made


def status_of(*lines):
    made = RunStatus()
    for line in lines:
        made.add(read_event(to_bytes(line)))
    return made


def step(number, at_s, *, ranks=(0, 1), rows=None, seconds=0.01, **change):
    return step_line(
        number,
        ranks=list(ranks),
        phases=rows or [ROW] * len(ranks),
        seconds=seconds,
        time_unix_s=BEGAN_UNIX_S + at_s,
        **change,
    )


def workers(step, at_s=1.0, *, ranks, lost=(), joined=(), pids=(), why=()):
    facts = {"ranks": ranks, "lost": lost, "joined": joined, "pids": pids, "why": why}
    return event("workers", step, at_s, **{k: list(v) for k, v in facts.items()})
