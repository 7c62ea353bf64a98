"""Curves for TensorBoard, read back with its own reader: each step once."""

import errno
import importlib.util
import os
import re
import sys
import warnings

import pytest
import torch
from tests.classified import by_sign as data
from tests.classified import cross_entropy as loss
from tests.warm.processes import run

import unisono
from unisono.callbacks import TensorBoard
from unisono.callbacks import tensorboard as module
from unisono.errors import NotPlainFileError

pytest.importorskip("tensorboard")


@pytest.fixture(autouse=True)
def other_peoples_warnings():
    """What TensorBoard's own modules warn of when they are loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def curves(path):
    """Read (step, value) of each tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(path), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(one.step, one.value) for one in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def steps_of(path):
    return {tag: [step for step, _ in curve] for tag, curve in curves(path).items()}


def train(directory, epochs=3, every=1, path=None, **options):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = options.pop("callbacks", None) or [TensorBoard(path, every=every)]
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=2, directory=directory, callbacks=callbacks, **options
    )
    trainer.fit(data(), batch_size=8, epochs=epochs, validate=data(7))
    return trainer


def test_each_step_is_there(tmp_path):
    trainer = train(tmp_path, clip_norm=1.0)
    found = curves(tmp_path / "tensorboard")
    assert found.keys() == {"train/loss", "learning_rate", "gradient_norm", "validation/loss"}
    assert [step for step, _ in found["train/loss"]] == list(range(9))
    assert [step for step, _ in found["validation/loss"]] == [2, 5, 8]
    assert found["train/loss"][-1][1] == pytest.approx(trainer.run.last["means"]["loss"])
    assert found["validation/loss"][-1][1] == pytest.approx(trainer.run.last["validation"]["loss"])


def test_some_steps_are_left_out(tmp_path):
    train(None, every=4, path=tmp_path / "curves")
    found = steps_of(tmp_path / "curves")
    assert (found["train/loss"], found["validation/loss"]) == ([0, 4, 8], [2, 5, 8])


def test_a_disk_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    train(None, epochs=1, path=tmp_path / "file")
    assert capsys.readouterr().out.count("curves are missing there; training goes on") == 1


def test_a_disk_that_is_full_is_tried_once_in_each_fit(tmp_path, monkeypatch, capsys):
    tried = []

    def fail(path, first):
        tried.append(first)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_open", fail)
    for epochs in (1, 2):
        train(tmp_path, epochs=epochs)
    assert tried == [0, 3]
    assert capsys.readouterr().out.count("No space left on device") == 2


def test_without_tensorboard_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'unisono\[tensorboard\]'"):
        TensorBoard()


def test_a_place_is_needed():
    with pytest.raises(unisono.CallbackError, match="`path` must say where the curves go"):
        train(None)


@pytest.mark.slow
def test_nothing_heavy_is_loaded_before_it_is_used():
    code = (
        "import sys; from unisono.callbacks import EMA, CSVLog, TensorBoard; TensorBoard('x');"
        "assert not {'tensorboard', 'torch.utils.tensorboard'} & sys.modules.keys()"
    )
    run([sys.executable, "-c", code], check=True)


def test_a_link_in_place_of_its_folder_is_refused(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (run / "tensorboard").symlink_to(outside)
    with pytest.raises(NotPlainFileError, match="must be a directory, but is a symbolic link"):
        train(run, epochs=1)
    assert list(outside.iterdir()) == []
    train(None, epochs=1, path=run / "tensorboard")  # the folder that a program names may be one
    assert len(list(outside.iterdir())) == 1


def test_nobody_knows_the_name_of_its_file_beforehand(tmp_path):
    train(tmp_path, epochs=1)
    train(tmp_path, epochs=2)
    names = [path.name for path in (tmp_path / "tensorboard").iterdir()]
    assert len({re.fullmatch(r".*\.([0-9a-f]{16})", name)[1] for name in names}) == 2


def test_a_second_that_is_over_while_names_are_looked_at_ends_no_run(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.0000000100.host.1.0").touch()
    times_s, slept_s = iter([100.9, 101.2]), []
    monkeypatch.setattr(module.time, "time", lambda: next(times_s))
    monkeypatch.setattr(module.time, "sleep", slept_s.append)
    module._wait_for_a_later_name(tmp_path)
    assert slept_s == [0.0]


def test_a_file_that_is_removed_meanwhile_is_begun_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)

    class Removes(unisono.callbacks.Callback):
        def on_step_end(self, fit, step):
            if step.number == 3:
                (tmp_path / "tensorboard").rename(tmp_path / "moved")

    train(tmp_path, callbacks=[Removes(), TensorBoard()])
    assert steps_of(tmp_path / "tensorboard")["train/loss"][-5:] == [4, 5, 6, 7, 8]
    assert steps_of(tmp_path / "moved")["train/loss"][:3] == [0, 1, 2]
    assert capsys.readouterr().out.count("was removed while it was written") == 1


def test_a_directory_whose_name_is_not_utf_8_ends_no_run(tmp_path, capsys):
    run = tmp_path / os.fsdecode(b"run \xff")
    assert train(run, epochs=1).run.position.step == 3
    assert "takes only paths in UTF-8): curves are missing there" in capsys.readouterr().out
