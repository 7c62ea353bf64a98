"""The best weights: those of the best validation, whole, wherever a run was split or disturbed."""

import errno
import os
import signal

import pytest
import torch
from tests.classified import cross_entropy
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import BestCheckpoint, Callback, EarlyStopping
from unisono.runtime.plainfile import written_whole
from unisono.training.callbacks import best_validation as module


class Fit:
    def __init__(self, directory=None):
        self.step, self.has_ended, self.directory = 0, False, directory
        self.has_joined = False
        self.model = self.validated_model = torch.nn.Linear(1, 1)
        self.said, self.saved = [], []

    def once(self, work, purpose):
        assert len(purpose) <= 24
        return work()

    def check_directory(self):
        return ""

    def say(self, line):
        self.said.append(line)

    def judge(self, rule, *losses):
        if self.step == 0:
            rule.on_begin(self)
        for loss in losses:
            self.step += 1
            rule.on_validation(self, {"loss": loss}, 0.0)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    fit = Fit(tmp_path)
    monkeypatch.setattr(module, "save_weights", lambda model, path: fit.saved.append(fit.step))
    return fit


@pytest.mark.parametrize(
    ("options", "losses", "saved", "best"),
    [
        ({}, [3.0, 2.0, 2.0, 2.5, 1.0], [1, 2, 5], 1.0),
        ({"better": "higher"}, [1.0, 3.0, 2.0], [1, 2], 3.0),
        ({"min_delta": 0.5}, [3.0, 2.7, 2.4], [1, 3], 2.4),
        ({}, [float("nan"), 2.0, float("nan")], [2], 2.0),
        ({}, [float("nan")], [], None),
    ],
)
def test_what_is_better_is_kept(fit, options, losses, saved, best):
    rule = BestCheckpoint(**options)
    fit.judge(rule, *losses)
    assert (fit.saved, rule.best) == (saved, best)
    assert rule.step == (saved[-1] if saved else None)


def test_what_nobody_asked_for_is_kept_and_forgotten(fit):
    rule = BestCheckpoint()
    fit.judge(rule, 3.0)
    fit.has_ended = True
    fit.judge(rule, 1.0)
    assert (fit.saved, rule.best, rule.step) == ([1, 2], 3.0, 1)


def test_a_disk_that_is_full_ends_nothing(fit, monkeypatch):
    def fail(model, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_weights", fail)
    rule = BestCheckpoint("best.safetensors")
    fit.judge(rule, 2.0)
    [line] = fit.said
    path = os.path.abspath("best.safetensors")
    assert f"the best weights so far, of step 1, are not in {path}" in line
    assert "No space left on device" in line


def test_a_folder_is_made(tmp_path):
    fit = Fit()
    fit.judge(BestCheckpoint(tmp_path / "new" / "folder" / "best.safetensors"), 2.0)
    assert (tmp_path / "new" / "folder" / "best.safetensors").is_file()
    assert fit.said == []
    rule = BestCheckpoint(tmp_path / "later")
    rule.on_begin(fit)
    (tmp_path / "later").mkdir()
    fit.judge(rule, 2.0)
    [line] = fit.said
    assert "later is a folder: pass a file in it, such as" in line
    assert line.endswith("model.safetensors; training continues.")


def data(num_samples):
    """A little to be learned, and then much to be learned by heart."""
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, 6, generator=generator)
    noise = torch.randn(num_samples, generator=generator)
    return TensorDataset(x, (x.sum(1) + 2 * noise > 0).long())


class Weights(Callback):
    """What the model is at each validation."""

    def __init__(self):
        self.seen = []

    def on_validation(self, fit, means, seconds):
        self.seen.append((means["loss"], [p.detach().clone() for p in fit.model.parameters()]))


def train(directory, steps=40, **options):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights, best = Weights(), BestCheckpoint()
    callbacks = [weights, EarlyStopping(4), best]
    trainer = unisono.Trainer(
        model,
        optimizer,
        cross_entropy,
        shards=3,
        directory=directory,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(data(40), batch_size=10, steps=steps, validate=data(31), validate_every=2)
    return (directory / "best.safetensors").read_bytes(), best.best, best.step, weights.seen


@pytest.mark.slow
def test_the_file_is_of_the_best_validation(tmp_path):
    _, best, step, seen = train(tmp_path)
    values = [value for value, _ in seen]
    at = values.index(min(values))
    assert 0 < at < len(values) - 1, "the case must have its best in the middle"
    assert (best, step) == (min(values), 2 * (at + 1))
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    unisono.load_weights(tmp_path / "best.safetensors", model)
    assert all(map(torch.equal, model.parameters(), seen[at][1]))
    unisono.load_weights(tmp_path, model)  # the newest checkpoint, as ever
    assert not all(map(torch.equal, model.parameters(), seen[at][1]))


@pytest.mark.slow
def test_the_next_lead_writes_what_the_lost_one_did_not(tmp_path):
    alone = train_and_die(tmp_path / "alone", [])
    num_saves = (tmp_path / "alone" / "saves").stat().st_size
    assert num_saves > 2
    # The last time that something is better nobody comes later to make up for it.
    dying = [num_saves - 1, num_saves]
    assert unisono.launch(train_and_die, tmp_path / "two", dying, workers=2) == [alone] * 2
    assert (tmp_path / "two" / "saves").stat().st_size > num_saves + 1
    assert not list((tmp_path / "two").glob(".*.part")), "what the lost ones have left"


def train_and_die(directory, dying):
    """The leader dies when it begins to write for the times in `dying`, all workers counted."""

    def save_weights(model, path):
        with open(directory / "saves", "ab") as file:
            file.write(b".")
            number = file.tell() - 1
        if number in dying:
            with written_whole(path):
                os.kill(os.getpid(), signal.SIGKILL)
        save(model, path)

    save, module.save_weights = module.save_weights, save_weights
    try:
        return train(directory)[:3]
    finally:
        module.save_weights = save


def test_it_needs_a_place_and_validation():
    def fit(**options):
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = unisono.Trainer(
            model, optimizer, cross_entropy, shards=1, callbacks=[BestCheckpoint()]
        )
        trainer.fit(data(10), batch_size=5, epochs=1, **options)

    with pytest.raises(ValueError, match="`validate` must be given for BestCheckpoint"):
        fit()
    with pytest.raises(
        unisono.errors.CallbackError, match="`path` must say where the best weights go"
    ):
        fit(validate=data(10))
