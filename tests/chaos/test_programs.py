"""Random programs: a short piece of what ``make chaos`` does at length."""

from __future__ import annotations

import sys

import pytest
from tests.chaos.exchanges import has_accelerator
from tests.chaos.programs import choices, runner
from tests.chaos.programs.__main__ import main
from tests.chaos.programs.blocks import Model


def test_a_seed_fixes_a_program():
    assert choices.choose(5) == choices.choose(5)
    assert choices.choose(5) != choices.choose(6)


@pytest.mark.parametrize("seed", [5, 322, 700, 701, 702])
def test_something_is_left_to_train(seed):
    chosen = choices.choose(seed)
    model = Model(chosen)
    if chosen.freezes_at >= 0:
        model.first.requires_grad_(False)
    used = [model.first, *model.blocks, model.last]
    assert any(p.requires_grad for layer in used for p in layer.parameters())


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


@pytest.mark.slow
def test_another_version_is_another_one(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["programs", "--seed", "5", "--against", sys.executable])
    with pytest.raises(SystemExit):
        main()
    assert "must name another version's Python" in capsys.readouterr().err


@pytest.mark.long
def test_what_another_version_finds_is_compared(tmp_path):
    (tmp_path / "run").mkdir()
    python = tmp_path / "python"  # this version under another name
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    ways = list(runner.run_against(5, tmp_path / "run", str(python)))
    assert [way.trouble for way in ways] == [""] * 3
    assert "then" in ways[-1].name
