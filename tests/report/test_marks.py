"""What happens once has words; what is usual has none."""

import pytest
from tests.report.lines import event, workers
from tests.report.synthetic import start_line, to_bytes

from unisono.tools.report.run_progress import mark_of
from unisono.training.events.events import read_event


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            start_line(step=3, num_workers=1),
            "started again at step 3 on 1 worker",
        ),
        (start_line(step=3, world_size=None), "started again at step 3"),
        (workers(3, ranks=[0], lost=[1], why=["x", "y"]), "x; y"),
        (workers(3, ranks=[0], lost=[1]), "worker 1 was lost"),
        (workers(3, ranks=[0, 1], joined=[1]), "worker 1 has come"),
        (workers(3, ranks=[0]), "others compute now"),
        (event("went_back", 3), "went back to step 3"),
        (
            event("went_back", 3, from_step=5),
            "went back to step 3 from step 5: 2 came again, with the same result",
        ),
        (event("failure", 3, rank=1, error="E", message="m"), "worker 1: E: m"),
        (event("failure", 3, error="E", message="m"), "E: m"),
        (event("end", 3, stopped_early=True), "stopped early after 3 steps"),
    ],
)
def test_what_happens_once_is_told(line, text):
    mark = mark_of(read_event(to_bytes(line)))
    assert (mark.step, mark.text) == (3, text)
