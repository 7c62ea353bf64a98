"""The table of a run: each step once, with columns that stay."""

import csv

import pytest
import torch
from tests.classified import by_sign as data
from tests.classified import with_accuracy as loss
from tests.once import computed_once

import unisono
from unisono.callbacks import CSVLog
from unisono.training.callbacks.logger_feed import Opening
from unisono.training.events.follow import EventReader


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
        callbacks=list(logs),
        **options,
    )
    trainer.fit(data(), batch_size=8, epochs=epochs, validate=data(7) if validate else None)
    return trainer


def write(directory, from_step=0, status="finished"):
    """Write the table of a run from its event file, as the process of the loggers does."""
    path = directory / "steps.csv"
    table = CSVLog.begin(Opening(path, 1, {}, {}, from_step))
    for event in EventReader(directory / "events.jsonl").new_events(table.begin_again):
        table.take(event)
        table.flush()
    table.end(status)
    return rows(path) if path.exists() else []


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_step(tmp_path):
    trainer = train(tmp_path, CSVLog(), clip_norm=1.0)
    steps = rows(tmp_path / "steps.csv")
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
    assert float(steps[-1]["validation_loss"]) == trainer.run.last["validation"]["loss"]


@pytest.mark.slow
def test_a_run_that_is_taken_up_goes_on_in_its_file(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole)
    for epochs in (1, 2, 3):
        train(parts, epochs=epochs)
        write(parts, from_step=3 * (epochs - 1))
        if epochs == 1:
            with open(parts / "steps.csv", "a") as file:
                file.write("3,1,0.5,0.5\n4,1,0.")  # of steps that come again
    assert write(parts, from_step=9) == write(whole)


def test_another_leader_goes_on_where_the_lost_one_ended(tmp_path):
    train(tmp_path)
    whole = write(tmp_path)
    events = (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    for num_lines in (3, 5, len(events)):
        (tmp_path / "events.jsonl").write_text("".join(events[:num_lines]))
        found = write(tmp_path, from_step=0 if num_lines == 3 else None, status="")
    assert found == whole[:-1]  # the last may get a validation
    assert write(tmp_path, from_step=None) == whole


def test_another_run_has_a_file_of_its_own(tmp_path):
    train(tmp_path, epochs=1)
    assert [len(write(tmp_path)), len(write(tmp_path))] == [3, 3]
    assert rows(tmp_path / "steps-1.csv") == rows(tmp_path / "steps.csv")


@computed_once()
def test_a_mean_that_comes_late_has_a_column_behind_the_others(tmp_path):
    def late(model, batch):
        late.calls += 1
        means = loss(model, batch)
        return means if late.calls > 4 else {"loss": means["loss"]}

    late.calls = 0
    train(tmp_path, loss=late, validate=False)
    table = write(tmp_path)
    assert list(table[0]) == ["step", "epoch", "loss", "learning_rate", "accuracy"]
    assert [bool(row["accuracy"]) for row in table] == [False] * 4 + [True] * 5
    assert all(row["loss"] for row in table)
    assert [path.name for path in tmp_path.glob("*.csv")] == ["steps.csv"]
    assert not list(tmp_path.glob(".*.part"))


def test_names_are_quoted_and_ours_are_ours(tmp_path):
    def odd(model, batch):
        return {**loss(model, batch), 'a, "b"': torch.tensor(2.0), "step": torch.tensor(7.0)}

    train(tmp_path, loss=odd, validate=False, epochs=1, groups=2)
    table = write(tmp_path)
    assert [row['a, "b"'] for row in table] == ["2.0"] * 3
    assert [row["step"] for row in table] == ["0", "1", "2"]
    assert {"learning_rate_0", "learning_rate_1"} <= table[0].keys()


def test_a_file_that_is_removed_meanwhile_is_begun_anew(tmp_path):
    train(tmp_path, epochs=1)
    table = CSVLog.begin(Opening(tmp_path / "steps.csv", 1, {}, {}, 0))
    for event in EventReader(tmp_path / "events.jsonl").new_events(table.begin_again):
        table.take(event)
        table.flush()
        (tmp_path / "steps.csv").unlink(missing_ok=True)
    table.end("finished")
    assert [row["step"] for row in rows(tmp_path / "steps.csv")] == ["2"]


def test_a_table_is_not_written_through_a_link(tmp_path):
    (tmp_path / "outside").write_text("somebody else's")
    (tmp_path / "steps.csv").symlink_to(tmp_path / "outside")
    train(tmp_path, epochs=1)
    assert "validation_loss" in write(tmp_path, from_step=None)[0]
    assert (tmp_path / "outside").read_text() == "somebody else's"


def test_without_a_directory_a_path_is_asked_for():
    with pytest.raises(unisono.errors.CallbackError, match="`path` must say where CSV writes"):
        train(None, CSVLog())
