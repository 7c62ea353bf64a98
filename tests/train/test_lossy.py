"""Ordinary programs, each with something that a lost worker once put out of step."""

import contextlib
import io

import pytest
import torch
from tests.classified import cross_entropy as loss
from torch import nn

import unisono


def made(width=8, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)
    )
    x = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    return model, torch.optim.Adam([{"params": model.parameters(), **options}], lr=1e-2), data


def quietly(work):
    with contextlib.redirect_stdout(io.StringIO()):
        return work()


def schedule_behind_the_block():
    """Steps a schedule, counts and averages whether or not the step was done."""
    model, optimizer, data = made()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    run = unisono.Run(model, optimizer, shards=4)
    run.state.update(schedule=schedule, average=torch.zeros(1), seen=0)
    for step in run.steps(data, batch_size=16, steps=40):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))
        schedule.step()
        run.state["seen"] += 1
        run.state["average"] = run.state["average"] * 0.9 + step.loss
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    return total, rate, schedule.last_epoch, run.state["seen"], run.state["average"].item()


def in_turn():
    trainers = []
    for width in (16, 12):
        model, optimizer, data = made(width)
        trainers.append(unisono.Trainer(model, optimizer, loss, shards=4))

    def work():
        for epochs in range(1, 4):
            for trainer, factor in zip(trainers, (1, 40), strict=True):
                trainer.fit(data, batch_size=16, epochs=factor * epochs)
        return [trainer.digest() for trainer in trainers]

    return quietly(work)


def named_groups():
    model, optimizer, data = made(tags={"layer": "all"}, names=["a", "b"])
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    return quietly(lambda: trainer.fit(data, batch_size=16, steps=40).digest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "faults"),
    [
        (schedule_behind_the_block, "kill:rank=1,step=25,at=updated"),
        (in_turn, "kill:rank=0,step=50,at=update"),
        (named_groups, "kill:rank=1,step=25,at=update"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_killed_worker_changes_nothing(monkeypatch, program, faults):
    undisturbed = program()
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    assert unisono.launch(program, workers=2, restarts=9) == [undisturbed] * 2
