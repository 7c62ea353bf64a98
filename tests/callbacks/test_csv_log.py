"""The table of a run: each step or epoch once, with columns that stay."""

import csv
import errno
import os
from types import SimpleNamespace

import pytest
import torch
from tests.classified import by_sign as data
from tests.classified import with_accuracy as loss

import unisono
from unisono.callbacks import CSVLog


def train(directory, *logs, epochs=3, groups=1, loss=loss, validate=True, **options):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    groups = [{"params": [p]} for p in model.parameters()] if groups == 2 else model.parameters()
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=1,
        directory=directory,
        schedule=schedule,
        callbacks=[*(logs or [CSVLog(), CSVLog(every="epoch")])],
        **options,
    )
    trainer.fit(data(), batch_size=8, epochs=epochs, validate=data(7) if validate else None)
    return trainer


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_step_and_epoch(tmp_path):
    trainer = train(tmp_path, clip_norm=1.0)
    steps, epochs = rows(tmp_path / "steps.csv"), rows(tmp_path / "epochs.csv")
    assert list(steps[0]) == [
        *("step", "epoch", "loss", "accuracy", "learning_rate", "gradient_norm"),
        *("validation_loss", "validation_accuracy"),
    ]
    assert [(row["step"], row["epoch"]) for row in steps] == [
        (str(n), str(n // 3)) for n in range(9)
    ]
    assert [float(row["learning_rate"]) for row in steps[::3]] == [0.1, 0.05, 0.025]
    assert [bool(row["validation_loss"]) for row in steps] == [False, False, True] * 3
    assert {"loss": float(steps[-1]["loss"]), "accuracy": float(steps[-1]["accuracy"])} == (
        trainer.run.last["means"]
    )
    found = trainer.run.last["validation"]["loss"]
    assert float(steps[-1]["validation_loss"]) == float(epochs[-1]["validation_loss"]) == found
    assert [row["step"] for row in epochs] == ["2", "5", "8"]
    mean = sum(float(row["loss"]) * n for row, n in zip(steps[:3], (8, 8, 4), strict=True)) / 20
    assert float(epochs[0]["loss"]) == pytest.approx(mean)


def test_a_run_that_is_taken_up_goes_on_in_its_file(tmp_path):
    train(tmp_path / "whole")
    train(tmp_path / "parts", epochs=1)
    with open(tmp_path / "parts" / "steps.csv", "a") as file:
        file.write("3,1,0.5,0.5\n4,1,0.")  # done after the last checkpoint, by one that was killed
    train(tmp_path / "parts", epochs=2)
    train(tmp_path / "parts")
    for name in ("steps.csv", "epochs.csv"):
        assert (tmp_path / "parts" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_another_run_has_a_file_of_its_own(tmp_path):
    train(tmp_path, epochs=1)
    train(tmp_path, epochs=2, resume="never")
    assert (len(rows(tmp_path / "steps-1.csv")), len(rows(tmp_path / "steps.csv"))) == (3, 6)


def test_a_mean_that_comes_late_has_a_column_behind_the_others(tmp_path):
    def late(model, batch):
        late.calls += 1
        means = loss(model, batch)
        return means if late.calls > 4 else {"loss": means["loss"]}

    late.calls = 0
    train(tmp_path, CSVLog(), loss=late, validate=False)
    table = rows(tmp_path / "steps.csv")
    assert list(table[0]) == ["step", "epoch", "loss", "learning_rate", "accuracy"]
    assert [bool(row["accuracy"]) for row in table] == [False] * 4 + [True] * 5
    assert all(row["loss"] for row in table)
    assert [path.name for path in tmp_path.glob("*.csv")] == ["steps.csv"]
    assert not list(tmp_path.glob(".*.part"))


def test_names_are_quoted_and_ours_are_ours(tmp_path):
    def odd(model, batch):
        return {**loss(model, batch), 'a, "b"': torch.tensor(2.0), "step": torch.tensor(7.0)}

    train(None, CSVLog(tmp_path / "odd.csv"), loss=odd, validate=False, epochs=1, groups=2)
    table = rows(tmp_path / "odd.csv")
    assert [row['a, "b"'] for row in table] == ["2.0"] * 3
    assert [row["step"] for row in table] == ["0", "1", "2"]
    assert {"learning_rate_0", "learning_rate_1"} <= table[0].keys()


@pytest.fixture
def fit():
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    said = []
    facts = {"is_leader": True, "is_first": True, "has_joined": False, "has_ended": False}
    facts["directory"] = None
    return SimpleNamespace(step=0, optimizer=optimizer, said=said, say=said.append, **facts)


def end_step(fit, log):
    log.on_step_end(
        fit, SimpleNamespace(number=fit.step, epoch=0, means={"loss": 0.5}, gradient_norm=None)
    )
    fit.step += 1


def test_a_disk_that_was_full_at_first_has_columns_later(tmp_path, fit, monkeypatch):
    def fail(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = CSVLog(tmp_path / "log.csv")
    log.on_begin(fit)
    with monkeypatch.context() as full:
        full.setattr(os, "write", fail)
        end_step(fit, log)
        log.on_validation(fit, {"loss": 0.25}, 0.0)
    end_step(fit, log)
    log.on_error(fit, RuntimeError())
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "log.csv")] == [
        ("0", "0.5"),
        ("1", "0.5"),
    ]
    assert len(fit.said) == 1


def test_a_full_disk_is_told_though_another_worker_shows_the_run(tmp_path, fit, capsys):
    (tmp_path / "file").touch()
    fit.is_first, fit.say = False, pytest.fail
    log = CSVLog(tmp_path / "file" / "log.csv")
    log.on_begin(fit)
    end_step(fit, log)
    assert capsys.readouterr().err.startswith("unisono: ")


def test_who_begins_anew_in_the_place_of_all_goes_on_in_their_file(tmp_path, fit):
    for has_joined in (False, True):
        fit.step, fit.has_joined = 0, has_joined
        log = CSVLog(tmp_path / "log.csv")
        log.on_begin(fit)
        for _ in range(3):
            end_step(fit, log)
    log.on_error(fit, RuntimeError())
    assert [row["step"] for row in rows(tmp_path / "log.csv")] == ["0", "1", "2"]
    assert os.listdir(tmp_path) == ["log.csv"]


def test_metrics_that_are_lists_have_no_column(tmp_path, fit):
    log = CSVLog(tmp_path / "log.csv")
    log.on_begin(fit)
    end_step(fit, log)
    log.on_validation(fit, {"loss": 0.25, "f1": 1, "of classes": [0.5, 0.5]}, 0.0)
    log.on_error(fit, RuntimeError())
    [row] = rows(tmp_path / "log.csv")
    assert list(row.values()) == ["0", "0", "0.5", "0.1", "0.25", "1"]


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="`every` must be one of"):
        CSVLog(every="minute")
    with pytest.raises(unisono.CallbackError, match="`path` must say where the table goes"):
        train(None)
