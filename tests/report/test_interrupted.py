"""A run that somebody has ended is told apart from one under way, and from one that failed."""

import pytest
from tests.report.lines import event, status_of, step
from tests.report.synthetic import BEGAN_UNIX_S, start_line, to_bytes

from unisono.report.history import gather
from unisono.report.page import state
from unisono.report.view import see


@pytest.mark.parametrize(("by", "words"), [("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM")])
def test_an_interrupted_run_says_so(tmp_path, by, words):
    lines = [start_line(), step(0, 0.5), event("interrupted", 1, 2.0, by=by)]
    found = see(status_of(*lines), {}, BEGAN_UNIX_S + 1000)
    assert found.facts[0] == "interrupted, 2 s"
    assert found.message == f"interrupted by {words} after 1 step"
    assert found.is_over
    (tmp_path / "events.jsonl").write_bytes(b"".join(to_bytes(line) for line in lines))
    assert state(gather(tmp_path).progress) == ("interrupted", "warn")
