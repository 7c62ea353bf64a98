"""Whoever comes later to what a program does between two loops finds the state of that moment."""

import functools
import tempfile
from pathlib import Path

import pytest
from tests.train import phases

import unisono

pytestmark = pytest.mark.slow

EACH = pytest.mark.parametrize("program", phases.PROGRAMS, ids=lambda one: one.__name__)


def written(files):
    return {path.name: path.read_text() for path in files.glob("*.json")}


@functools.cache
def undisturbed(program):
    with tempfile.TemporaryDirectory() as files:
        return phases.silent(program, None, Path(files)), written(Path(files))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "workers"),
    [
        (phases.unfreezes, 2),
        (phases.breaks, 1),
        (phases.takes_whole, 3),
        (phases.calls_often, 2),
    ],
)
def test_a_replacement_writes_what_was_there(program, workers, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=10")
    for directory in (None, tmp_path / "run"):
        for file in tmp_path.glob("*.json"):
            file.unlink()
        digests = unisono.launch(phases.silent, program, directory, tmp_path, workers=workers)
        assert digests == [undisturbed(program)[0]] * workers
        assert written(tmp_path) == undisturbed(program)[1]


@EACH
def test_a_resumed_run_writes_what_was_there(program, tmp_path):
    phases.silent(program, tmp_path / "run", tmp_path, 10)
    assert phases.silent(program, tmp_path / "run", tmp_path) == undisturbed(program)[0]
    assert written(tmp_path) == undisturbed(program)[1]


@pytest.mark.slow
@pytest.mark.parametrize("program", [phases.unfreezes, phases.breaks])
def test_others_that_resume_and_lose_one_write_what_was_there(program, monkeypatch, tmp_path):
    unisono.launch(phases.silent, program, tmp_path / "run", tmp_path, 10, workers=3)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=11")
    digests = unisono.launch(phases.silent, program, tmp_path / "run", tmp_path, workers=2)
    assert digests == [undisturbed(program)[0]] * 2
    assert written(tmp_path) == undisturbed(program)[1]
