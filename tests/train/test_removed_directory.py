"""A run directory that goes away while a run is under way is taken up again, or left to others."""

import fcntl
import json
import os
import re
import shutil

import pytest
import torch
from tests.descriptors import is_locked
from tests.promises import promise
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import BestCheckpoint, Callback
from unisono.runtime.checkpoint import run_directory
from unisono.training import checkpoints
from unisono.training.callbacks import journal

LAST = 8


class At(Callback):
    def __init__(self, number, act):
        self._number, self._act = number, act

    def on_step_end(self, fit, step):
        if fit.is_leader and step.number == self._number:
            self._act()


def make(directory, *callbacks, **options):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return unisono.Trainer(
        model, optimizer, loss, shards=2, directory=directory, callbacks=list(callbacks), **options
    )


def train(trainer, epochs=LAST // 2):
    data = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(2)))
    trainer.fit(data, batch_size=4, epochs=epochs, validate=data)
    return trainer.digest()


def fit(directory, *callbacks, **options):
    return train(make(directory, *callbacks, **options))


def events(directory):
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def check_taken_up(directory, told):
    """See that the rest of a run is there whose directory went away after step 3."""
    assert len(re.findall("run directory .* was removed or replaced", told)) == 1
    found = events(directory)
    assert found[0]["event"] == "start"
    steps = [event["step"] for event in found if event["event"] == "step"]
    assert steps == list(range(found[0]["step"], LAST))
    assert 3 <= steps[0] <= 5
    assert found[-1]["event"] == "end"
    names = sorted(os.listdir(directory / "checkpoints"))
    assert names[-1] == f"step-{LAST:012}"
    assert any(int(name[5:]) in (5, 6) for name in names), "one at once, as those before are gone"


@pytest.fixture(autouse=True)
def _every_line_at_once(monkeypatch):
    monkeypatch.setattr(journal, "_HELD_S", 0.0)


@promise("nothing-lost.16")
@pytest.mark.parametrize("is_moved", [False, True])
def test_all_of_it_is_taken_up_again(tmp_path, capsys, is_moved):
    run, seen = tmp_path / "run", []

    def go_away():
        run.rename(tmp_path / "moved")  # at once, while a checkpoint may be written there
        if not is_moved:
            shutil.rmtree(tmp_path / "moved", ignore_errors=True)

    callbacks = At(3, go_away), At(LAST - 1, lambda: seen.append(is_locked(run)))
    whole = fit(tmp_path / "whole", BestCheckpoint())
    assert fit(run, *callbacks, BestCheckpoint(), checkpoint=3) == whole
    told = capsys.readouterr()
    check_taken_up(run, told.out + told.err)
    assert seen == [True]
    if is_moved:
        assert [event["step"] for event in events(tmp_path / "moved")][-1] <= 4


@promise("nothing-lost.16")
@pytest.mark.slow
def test_a_directory_that_another_job_holds_by_then_is_left_alone(tmp_path, capsys):
    run, fds = tmp_path / "run", []

    def another_job():
        run.rename(tmp_path / "moved")
        run.mkdir()
        (run / "events.jsonl").write_text("another's\n")
        fds.append(os.open(run, os.O_RDONLY))
        fcntl.flock(fds[0], fcntl.LOCK_EX)

    fit(run, At(3, another_job), BestCheckpoint(), checkpoint=2)
    told = capsys.readouterr()
    assert "must belong to one job at a time" in told.out + told.err
    assert "training continues" in told.out + told.err
    os.close(fds[0])
    assert os.listdir(run) == ["events.jsonl"]
    assert (run / "events.jsonl").read_text() == "another's\n"


def test_a_file_alone_that_is_removed_is_begun_anew(tmp_path, capsys):
    run = tmp_path / "run"
    fit(run, At(3, (run / "events.jsonl").unlink), checkpoint=3)
    told = capsys.readouterr()
    assert (told.out + told.err).count("events.jsonl was removed or replaced") == 1
    assert events(run)[0]["event"] == "start"
    assert [event["step"] for event in events(run) if event["event"] == "step"][-3:] == [5, 6, 7]
    assert sorted(os.listdir(run / "checkpoints"))[0] == "step-000000000003"


def train_and_remove(directory):
    seen = []
    fit(
        directory,
        At(3, lambda: directory.rename(directory.with_name("moved"))),
        At(LAST - 1, lambda: seen.append(is_locked(directory))),
        checkpoint=3,
    )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_take_it_up_together(tmp_path, capfd, workers):
    run = tmp_path / "run"
    seen = unisono.launch(train_and_remove, run, workers=workers)
    assert seen[0] == [True]
    told = capfd.readouterr()
    assert told.err.count("run was under way") == 1
    assert sorted(os.listdir(run / "checkpoints"))[-1] == f"step-{LAST:012}"
    assert events(run)[-1]["event"] == "end"
    assert not is_locked(run)


def test_a_directory_that_cannot_be_seen_for_a_moment_makes_nothing_due(tmp_path, monkeypatch):
    """As with a network file system that is away: each look had made a checkpoint due."""
    run, seen = tmp_path / "run", []

    class Looks(Callback):
        def on_step_end(self, fit, step):
            if step.number == 3:
                monkeypatch.setattr(run_directory, "file_id_of", lambda path: None)
                monkeypatch.setattr(checkpoints, "file_id_of", lambda path: None)
            if step.number == 5:
                monkeypatch.undo()
                monkeypatch.setattr(journal, "_HELD_S", 0.0)

        def on_checkpoint(self, fit, step):
            seen.append(step)

    fit(run, Looks(), checkpoint=3)
    assert seen == [3, 6, LAST]
    assert [event["step"] for event in events(run) if event["event"] == "step"] == list(range(LAST))


def test_a_directory_that_goes_away_between_two_calls_is_taken_up(tmp_path, capsys):
    run, seen = tmp_path / "run", []
    look = At(LAST - 1, lambda: seen.append(is_locked(run)))
    trainer = make(run, look, BestCheckpoint())
    train(trainer, epochs=2)
    run.rename(tmp_path / "moved")
    train(trainer)
    assert seen == [True]
    told = capsys.readouterr()
    assert len(re.findall("run directory .* was removed or replaced", told.out + told.err)) == 1
    assert events(run)[0]["event"] == "start"
    assert [event["step"] for event in events(run) if event["event"] == "step"] == [4, 5, 6, 7]
    assert trainer.digest() == fit(tmp_path / "whole")
