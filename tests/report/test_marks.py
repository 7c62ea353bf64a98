"""What happens once has a kind and words; what is usual has none."""

import pytest
from tests.report.lines import event, step, workers
from tests.report.synthetic import start_line, to_bytes

from unisono.report.events import read_event
from unisono.report.marks import Severity, mark_of


@pytest.mark.parametrize(
    ("line", "severity", "text"),
    [
        (
            start_line(step=3, num_workers=1),
            Severity.NEUTRAL,
            "started again at step 3 on 1 worker",
        ),
        (start_line(step=3, world_size=None), Severity.NEUTRAL, "started again at step 3"),
        (workers(3, ranks=[0], lost=[1], why=["x", "y"]), Severity.BAD, "x; y"),
        (workers(3, ranks=[0], lost=[1]), Severity.BAD, "worker 1 was lost"),
        (workers(3, ranks=[0, 1], joined=[1]), Severity.GOOD, "worker 1 has come"),
        (workers(3, ranks=[0]), Severity.NEUTRAL, "others compute now"),
        (event("went_back", 3), Severity.WARN, "went back to step 3"),
        (
            event("went_back", 3, from_step=5),
            Severity.WARN,
            "went back to step 3 from step 5: 2 came again, with the same result",
        ),
        (event("failure", 3, rank=1, error="E", message="m"), Severity.BAD, "worker 1: E: m"),
        (event("failure", 3, error="E", message="m"), Severity.BAD, "E: m"),
        (event("end", 3, stopped_early=True), Severity.NEUTRAL, "stopped early after 3 steps"),
    ],
)
def test_what_happens_once_is_told(line, severity, text):
    mark = mark_of(read_event(to_bytes(line)))
    assert (mark.step, mark.severity, mark.text) == (3, severity, text)


@pytest.mark.parametrize(
    "line", [start_line(), step(3, 1), event("end", 3), event("checkpoint", 3)]
)
def test_what_is_usual_is_not(line):
    assert mark_of(read_event(to_bytes(line))) is None
