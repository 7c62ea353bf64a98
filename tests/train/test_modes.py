"""What a program does to its layers under way stays so when a run goes on."""

import contextlib
import functools
import io

import pytest
import torch
from tests.classified import cross_entropy as loss_of
from tests.classified import taken
from tests.replacements import wait_for_replacement
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback

STEPS_PER_EPOCH = 4


class Thaw(Callback):
    """The usual recipe of fine-tuning: at first the head alone, then all."""

    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            fit.model[0].requires_grad_(True)


class Settle(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            fit.model[1].eval()


class Annealed(nn.Linear):
    temperature = 5.0

    def forward(self, inputs):
        return super().forward(inputs) / self.temperature

    def get_extra_state(self):
        return {"temperature": self.temperature, "of": torch.tensor(self.temperature)}

    def set_extra_state(self, state):
        assert state["of"] == torch.tensor(state["temperature"])
        self.temperature = state["temperature"]


class Opaque(Annealed):
    def get_extra_state(self):
        return object()


class Cool(Callback):
    last = Annealed

    def on_step_end(self, fit, step):
        fit.model[3].temperature *= 0.9


class CoolOpaque(Cool):
    last = Opaque


def make(kind, directory=None, loss=None):
    torch.manual_seed(0)
    last = getattr(kind, "last", nn.Linear)
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), last(12, 4))
    model[0].requires_grad_(kind is not Thaw)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return unisono.Trainer(
        model, optimizer, loss or loss_of, shards=4, directory=directory, callbacks=[kind()]
    )


def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(80, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def train(kind, ends, directory=None):
    trainer = make(kind, directory)
    with contextlib.redirect_stdout(io.StringIO()):
        for steps in ends:
            trainer.fit(data(), batch_size=20, steps=steps)
    return trainer.digest()


EACH = pytest.mark.parametrize("kind", [Thaw, Settle, Cool])


@functools.cache
def undisturbed(kind):
    return train(kind, [14])


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("stop", [2, 6, 8, 9])
def test_a_run_that_is_resumed_goes_on_with_the_layers_as_they_were(kind, stop, tmp_path):
    train(kind, [stop], tmp_path)
    assert train(kind, [14], tmp_path) == undisturbed(kind)


def of_frozen_statistics(directory=None, steps=14):
    """Fit with a BatchNorm in `eval()`, twice, and evaluate in between."""
    trainer = make(Cool, directory)
    trainer.run.model[1].eval()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(data(), batch_size=20, steps=6, validate=data())
        trainer.evaluate(data(), batch_size=20)
        trainer.fit(data(), batch_size=20, steps=steps)
    modes = [module.training for module in trainer.run.model]
    return trainer.run.model[1].num_batches_tracked.item(), modes, trainer.digest()


@pytest.mark.slow
def test_each_layer_trains_in_the_mode_in_which_the_program_left_it(monkeypatch, tmp_path):
    alone = of_frozen_statistics()
    assert alone[:2] == (0, [True, False, True, True])
    of_frozen_statistics(tmp_path, 9)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=10")
    assert unisono.launch(of_frozen_statistics, tmp_path, workers=2) == [alone] * 2


def test_a_model_wholly_in_eval_gets_one_line(capsys):
    for evaluates in (False, True):
        trainer = make(Thaw)
        trainer.run.model.train(not evaluates)
        for steps in (2, 4):
            trainer.fit(data(), batch_size=20, steps=steps)
        said = capsys.readouterr()
        count = (said.out + said.err).count("every layer of the model is in `eval()` mode")
        assert count == evaluates
        assert trainer.run.model.training is not evaluates


@pytest.mark.slow
def test_a_later_fit_begins_with_the_layers_as_they_were_and_goes_on_so(tmp_path):
    class SettleLate(Settle):
        def on_epoch_end(self, fit):
            if fit.epoch in (1, 3):
                fit.model[1].eval()

    undisturbed = train(SettleLate, [10, 18, 22])
    for stopped_after in ([10], [10, 17], [10, 18], [10, 18, 20]):
        directory = tmp_path / str(stopped_after[-1])
        train(SettleLate, stopped_after, directory)
        assert train(SettleLate, [10, 18, 22], directory) == undisturbed


def test_a_loop_that_is_left_in_evaluation_mode_goes_on_in_training_mode(tmp_path):
    def run_to(num_steps):
        run = make(Settle, tmp_path).run
        run.model.train()
        for _ in taken(run, loss_of, data(), batch_size=20, steps=9):
            if run.position.step == num_steps:
                run.model.eval()
                break
        return run

    run_to(3)
    assert run_to(4).position.step == 4
    run = run_to(9)
    assert run.model[1].num_batches_tracked == 9


def train_until_all_are_back(kind):
    """Train; in some steps those who go on wait for who replaces the lost."""

    def loss(model, batch):
        if trainer.run.position.step in (10, 18):
            wait_for_replacement(trainer.run._context.team)
        return loss_of(model, batch)

    trainer = make(kind, loss=loss)
    trainer.fit(data(), batch_size=20, steps=22)
    flags = [p.requires_grad for p in trainer.run.model.parameters()]
    temperature = getattr(trainer.run.model[3], "temperature", None)
    return trainer.digest(), flags, [m.training for m in trainer.run.model.modules()], temperature


@pytest.mark.slow
@EACH
def test_who_replaces_a_lost_worker_has_the_layers_as_they_were(kind, monkeypatch):
    undisturbed = train_until_all_are_back(kind)
    faults = "kill:rank=0,step=9,at=update; kill:rank=1,step=15"
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    assert unisono.launch(train_until_all_are_back, kind, workers=2) == [undisturbed] * 2


def test_extra_state_that_cannot_be_kept_is_refused_by_name(tmp_path):
    with pytest.raises(
        unisono.errors.CheckpointError, match=r"`extra_state/3` in `run.state` must be"
    ):
        train(CoolOpaque, [1], tmp_path)


def test_a_model_without_extra_state_has_no_place_for_it():
    assert "extra_state" not in make(Thaw).run.state


def freeze_on_one_rank():
    trainer = make(Settle)
    if unisono.world().rank == 1:
        trainer.run.model[0].bias.requires_grad_(False)
    trainer.fit(data(), batch_size=20, steps=2)


@pytest.mark.slow
def test_what_one_rank_alone_has_frozen_is_refused():
    words = r"`requires_grad=False` must be .* is 'none' on rank 0 and '`0.bias`' on rank 1"
    with pytest.raises(unisono.errors.MismatchError, match=words):
        unisono.launch(freeze_on_one_rank, workers=2)
