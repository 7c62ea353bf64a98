"""What shards tell beside their gradients, and the seconds of a step's phases."""

import pytest
import torch

import unisono
from unisono.engine.step import records as phase_timers
from unisono.engine.step.records import Phase, PhaseTimers


def test_rows_of_any_length_are_read_whole():
    names = [f"a scalar with a long name, number {number}" for number in range(12)]

    told = {name: float(place) for place, name in enumerate(names)}
    means = train_with(lambda model, batch: {"loss": model(batch[0]).mean(), **told})
    assert {name: means[name] for name in names} == told


def train_with(loss):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
    data = torch.utils.data.TensorDataset(torch.randn(4, 3))
    for step in run.steps(data, batch_size=4, epochs=1):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))
    return step.means


def test_a_scalar_counts_as_it_is_when_its_shard_is_done():
    seen, rows = torch.zeros(()), []

    def loss(model, batch):
        rows.append(batch[0].mean().item())
        return {"loss": model(batch[0]).mean(), "seen": seen.copy_(rows[-1])}

    means = train_with(loss)
    assert means["seen"] == pytest.approx(sum(rows[:2]) / 2)


def test_a_loss_that_is_not_a_number_is_named_before_it_is_differentiated():
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=True),
        pytest.raises(unisono.errors.NonFiniteLossError, match="nan in step 0 for shard 0"),
    ):
        train_with(lambda model, batch: (0 * model(batch[0])).mean().log() * float("nan"))


def test_phases_add_up(monkeypatch):
    now_s = [5.0]
    monkeypatch.setattr(phase_timers, "perf_counter", lambda: now_s[0])
    timers = PhaseTimers()
    for begun_s in (5.0, 6.5):
        timers.begin()
        for phase in (Phase.LOADING, Phase.FORWARD, Phase.LOADING):
            now_s[0] += 0.5
            timers.lap(phase)
        assert timers.times == [begun_s, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
