"""What modules say in `get_extra_state` belongs to a run as their tensors do."""

import contextlib
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback


class Annealed(nn.Linear):
    """Divides by a number of its own."""

    def __init__(self):
        super().__init__(8, 4)
        self.temperature = 5.0

    def forward(self, inputs):
        return super().forward(inputs) / self.temperature

    def get_extra_state(self):
        return {"temperature": self.temperature, "of": torch.tensor(self.temperature)}

    def set_extra_state(self, state):
        assert state["of"] == torch.tensor(state["temperature"])
        self.temperature = state["temperature"]


class Cool(Callback):
    def on_step_end(self, fit, step):
        fit.model[0].temperature *= 0.9


def make(layer=Annealed, directory=None):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return unisono.Trainer(
        model, optimizer, loss, shards=4, directory=directory, callbacks=[Cool()]
    )


def train(steps, directory=None):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(43, 8, generator=generator)
    trainer = make(directory=directory)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=16, steps=steps)
    return trainer.digest(), trainer.run.model[0].temperature


def test_a_run_that_is_resumed_goes_on_with_it(tmp_path):
    train(7, tmp_path)
    assert train(12, tmp_path) == train(12)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill:rank=0,step=7,at=update", "kill:rank=1,step=7"])
def test_lost_workers_change_nothing(fault, monkeypatch):
    monkeypatch.setenv("UNISONO_FAULTS", fault)
    assert unisono.launch(train, 12, workers=2) == [train(12)] * 2


class Opaque(Annealed):
    def get_extra_state(self):
        return object()


def test_what_cannot_be_kept_is_refused_by_name(tmp_path):
    trainer = make(Opaque, tmp_path)
    data = TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long))
    with pytest.raises(unisono.CheckpointError, match=r"`extra_state/0` in `run.state` must be"):
        trainer.fit(data, batch_size=4, steps=1)


def test_a_model_without_any_has_no_place_for_it():
    assert "extra_state" not in make(lambda: nn.Linear(8, 4)).run.state
