"""Optimizers that ask for the loss again: the bits of a plain loop, on any number of workers."""

import os
import signal

import pytest
import torch
from tests.once import computed_once
from tests.train import closures
from torch import nn

import unisono
from unisono.programs.walk import Walk


@pytest.mark.parametrize("name", closures.OPTIMIZERS)
def test_one_shard_has_the_bits_of_a_plain_loop(name):
    expected = closures.in_one_process(name)
    made = closures.trainer(name, 1)
    made.fit(closures.data(), batch_size=closures.BATCH_SIZE, steps=closures.STEPS, shuffle=False)
    found = made.run.model.state_dict()
    for key in expected:
        assert torch.equal(expected[key], found[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sam", "lbfgs"])
def test_the_program_says_how_a_loss_is_computed_in_a_loop_of_its_own(name):
    made = closures.trainer(name, 4)
    run = made.run
    for step in run.steps(
        closures.data(), batch_size=closures.BATCH_SIZE, steps=closures.STEPS, shuffle=False
    ):
        with step:
            step.again(lambda batch: closures.loss_of(run.model, batch))
            for batch in step.shards:
                step.backward(closures.loss_of(run.model, batch))
        assert step.is_done
        assert step.loss > 0
    assert made.digest() == closures.train(name)


@pytest.mark.parametrize("optimizer", ["closure", "several"])
def test_a_step_of_an_earlier_loop_is_not_looked_into_as_the_programs_own(optimizer):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    made = torch.optim.LBFGS([*model.parameters()])
    if optimizer == "several":
        made = {name: torch.optim.SGD([part]) for name, part in model.named_parameters()}
    run = unisono.Run(model, made, shards=1)
    step = next(run.steps([torch.zeros(3)] * 4, batch_size=2, steps=1))
    assert type(step) is not unisono.training.step.Step
    step.again(lambda batch: model(batch).mean())
    assert Walk({"step": step}).holders == []


def test_the_loss_of_a_step_is_that_of_its_first_evaluation():
    made = closures.trainer("sam", 2)
    first = closures.data()[: closures.BATCH_SIZE]
    with torch.no_grad():
        shards = [[part[v::2] for part in first] for v in range(2)]
        copy = closures.model_of()
        expected = [closures.loss_of(copy, shard).item() for shard in shards]
    summary = made.fit(closures.data(), batch_size=closures.BATCH_SIZE, steps=1, shuffle=False)
    assert summary.means["loss"] == pytest.approx(sum(expected) / 2)


@computed_once()
def test_random_numbers_are_those_of_the_first_evaluation():
    drawn = []

    def loss(model, batch):
        drawn.append(torch.rand(()).item())
        return closures.loss_of(model, batch)

    model = closures.model_of()
    optimizer = closures.SAM(model.parameters(), lr=0.1)
    made = unisono.Trainer(model, optimizer, loss, shards=2)
    made.fit(closures.data(), batch_size=closures.BATCH_SIZE, steps=2, shuffle=False)
    assert drawn[:2] == drawn[2:4]
    assert drawn[4:6] == drawn[6:8]
    assert len(set(drawn)) == 4


def test_without_a_way_to_compute_the_loss_again_it_is_said():
    run = closures.trainer("sam", 2).run
    with pytest.raises(RuntimeError, match=r"call `step.again\(lambda batch"):
        for step in run.steps(closures.data(), batch_size=12, steps=1):
            with step:
                for batch in step.shards:
                    step.backward(closures.loss_of(run.model, batch))


def test_an_optimizer_whose_closure_may_be_left_out_is_called_without_one():
    """As torch's own; a class derived from it, whose `step` requires one, is called with it."""

    class Sometimes(torch.optim.SGD):
        def step(self, closure=None):
            called_with.append(closure)
            super().step()

    class Always(Sometimes):
        def step(self, closure):
            return super().step(closure)

    for kind, is_given in ((Sometimes, False), (Always, True)):
        called_with = []
        model = closures.model_of()
        made = unisono.Trainer(model, kind(model.parameters(), lr=0.1), closures.loss_of, shards=2)
        made.fit(closures.data(), batch_size=closures.BATCH_SIZE, steps=1)
        assert [closure is not None for closure in called_with] == [is_given]
        assert made.run.fixed.get("closure", False) is is_given


def test_what_does_not_fit_is_refused_before_training(monkeypatch):
    model = nn.Linear(6, 2)
    optimizer, scaler = torch.optim.LBFGS(model.parameters()), torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="requires a closure cannot be combined with a scaler"):
        unisono.Run(model, optimizer, shards=2, scaler=scaler)
    loss = unisono.WholeBatch(lambda model, batch: model(batch), lambda model, rows: rows.mean())
    with pytest.raises(ValueError, match="closure cannot be combined with a loss over the wh"):
        unisono.Trainer(model, optimizer, loss, shards=2)
    monkeypatch.setenv("UNISONO_EXCHANGE", "shared")
    with pytest.raises(ValueError, match="whose `step` requires a closure needs one for each"):
        unisono.Run(model, optimizer, shards=2)


@computed_once()
def test_a_loss_that_is_not_finite_ends_the_step_in_any_evaluation():
    calls = []

    def loss(model, batch):
        calls.append(1)
        return closures.loss_of(model, batch) * (float("nan") if len(calls) == 3 else 1.0)

    model = closures.model_of()
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = closures.SAM(model.parameters(), lr=0.1)
    made = unisono.Trainer(model, optimizer, loss, shards=2)
    with pytest.raises(unisono.errors.NonFiniteLossError):
        made.fit(closures.data(), batch_size=closures.BATCH_SIZE, steps=2, shuffle=False)
    # The optimizer had moved them by then.
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name


@computed_once()
def train_and_die(name, marker, call):
    """Train; rank 1 dies as it computes a loss for the `call`-th time, once."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == call and os.environ.get("RANK") == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return closures.loss_of(model, batch)

    return closures.train(name, loss=loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call"), [("sam", 3), ("sam", 4), ("line search", 3), ("line search", 8)]
)
def test_a_worker_may_be_lost_in_any_evaluation(tmp_path, name, call):
    alone = closures.train(name)
    marker = tmp_path / "killed"
    assert unisono.launch(train_and_die, name, marker, call, workers=3) == [alone] * 3
    assert marker.exists()
