"""A call that fails between two steps is resumed with the conclusions of the step that it had done.

The checkpoint had the step, and a schedule that had not seen it stayed a step behind for good.
"""

import contextlib

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import EMA, Callback, EarlyStopping
from unisono.errors import CallbackError

MOMENTS = ["on_step_end", "metric", "on_validation", "on_epoch_end"]
SCHEDULES = {
    "step": lambda optimizer: unisono.Schedule(
        lr_scheduler.ExponentialLR(optimizer, 0.8), every="step"
    ),
    "epoch": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=10.0
    ),
}


class Fails(Callback):
    """Fails in one of its methods once two epochs are done, or in a metric."""

    def __init__(self, moment):
        self.moment = moment
        self.seen = []

    def _look(self, moment, step):
        self.seen.append((moment, step))
        if moment == self.moment and step == 4:
            raise OSError("gone")

    def on_step_end(self, fit, step):
        self._look("on_step_end", fit.step)

    def on_validation(self, fit, means, seconds):
        self._look("on_validation", fit.step)

    def on_epoch_end(self, fit):
        self._look("on_epoch_end", fit.step)

    def metric(self, outputs, targets):
        self._look("metric", unisono.progress().step)
        return 1.0


def made(directory, schedule, moment="", *more):
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(
        model,
        optimizer,
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        shards=2,
        directory=directory,
        schedule=SCHEDULES[schedule](optimizer),
        callbacks=[Fails(moment), *more],
    )


def fit(trainer):
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    metrics = {"it": trainer.callbacks[0].metric}
    rows = trainer.fit(data, batch_size=6, epochs=4, validate=data, validate_metrics=metrics)
    rates = [group["lr"] for group in trainer.run.optimizer.param_groups]
    return trainer.digest(), list(rows), rates


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_resumed_run_draws_what_was_left(tmp_path, moment, schedule):
    whole = fit(made(None, schedule))
    with pytest.raises((CallbackError, OSError), match="gone"):
        fit(made(tmp_path, schedule, moment))
    again = made(tmp_path, schedule)
    assert fit(again) == whole
    at = MOMENTS.index(moment)
    expected = MOMENTS[: at + 1] + MOMENTS[at + (moment != "metric") :]  # what it had seen is kept
    assert [seen for seen, step in again.callbacks[0].seen if step == 4] == expected


def test_callbacks_that_missed_a_step_are_named(tmp_path, capfd):
    with pytest.raises(CallbackError, match="gone"):
        fit(made(tmp_path, "epoch", "on_step_end", EMA(), EarlyStopping()))
    capfd.readouterr()
    fit(made(tmp_path, "epoch", "", EMA(), EarlyStopping()))
    assert "EMA did not see `on_step_end` of step 3, as another" in capfd.readouterr().out


def test_the_same_process_goes_on_as_well():
    whole, trainer = fit(made(None, "epoch")), made(None, "epoch", "metric")
    with pytest.raises(OSError, match="gone"):
        fit(trainer)
    trainer.callbacks[0].moment = ""
    assert fit(trainer) == whole


def went_on(moment):
    trainer = made(None, "step", moment)
    with contextlib.suppress(CallbackError, OSError):
        fit(trainer)
    trainer.callbacks[0].moment = ""
    return fit(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["on_step_end", "metric"])
def test_what_was_left_is_drawn_once_if_a_worker_is_lost_in_the_next_update(moment, monkeypatch):
    whole = went_on("")
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=4,at=update")
    assert unisono.launch(went_on, moment, workers=2) == [whole] * 2


def test_a_stop_that_was_left_comes_before_the_next_step(tmp_path):
    stops = [EarlyStopping(1, min_delta=100.0) for _ in range(3)]
    whole = fit(made(None, "epoch", "", stops[0]))
    assert whole[1][-1]["step"] == 4
    with pytest.raises(OSError, match="gone"):
        fit(made(tmp_path, "epoch", "metric", stops[1]))
    assert fit(made(tmp_path, "epoch", "", stops[2])) == whole


def resumed(directory, moment):
    try:
        return fit(made(directory, "epoch", moment))
    except OSError:
        return "gone"


@pytest.mark.slow
def test_on_several_workers_the_bits_are_the_same(tmp_path):
    whole = fit(made(None, "epoch"))
    assert unisono.launch(resumed, tmp_path, "metric", workers=2) == ["gone"] * 2
    assert unisono.launch(resumed, tmp_path, "", workers=1) == [whole]
