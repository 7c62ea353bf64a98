"""Random programs: a short piece of what ``make chaos`` does at length."""

from __future__ import annotations

import pytest
from tests.chaos.exchanges import has_accelerator
from tests.chaos.programs import runner
from tests.chaos.programs.__main__ import main


@pytest.mark.long
def test_a_program_comes_to_the_same_in_every_way(tmp_path):
    ways = list(runner.run(5, tmp_path))
    others = 2 if has_accelerator() else 1
    assert [way.trouble for way in ways] == [""] * (7 + 2 * others)
    assert ways[-2 - others].num_disturbed >= 1


def test_a_program_that_goes_wrong_is_named(monkeypatch, capsys):
    ways = [runner.Way("plain Python", ""), runner.Way("3 workers", "digest must be 1, but is 2")]
    monkeypatch.setattr("tests.chaos.programs.__main__.run", lambda seed, *_, **__: iter(ways))
    monkeypatch.setattr("sys.argv", ["programs", "--seed", "1234"])
    assert main() == 1
    said = capsys.readouterr().out
    assert "3 workers: NOT EQUAL\ndigest must be 1, but is 2" in said
    assert "-m tests.chaos.programs --seed 1234\n" in said
