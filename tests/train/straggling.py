"""Trains with one worker that is slower in one phase by a part of a step; the step is measured."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import quantiles

import torch
from torch import nn
from torch.nn import functional as F

import unisono

SIZE, BATCH_SIZE, MEASURED_STEPS = 256, 64, 40
_OVERSLEEPS_S = 1.5e-4  # a sleep takes about so much longer than it was asked to


class Planted:
    """What makes a worker slow in one phase, once it knows by how much. Final."""

    def __init__(self, phase: str, how: str) -> None:
        self.phase, self.how, self.seconds = phase, how, 0.0

    def meet(self, phase: str) -> None:
        """Be in a phase."""
        if phase != self.phase or not self.seconds:
            return
        clock = time.thread_time  # whoever takes its core meanwhile
        until_s = clock() + self.seconds
        if self.how == "sleep":
            clock = time.perf_counter
            until_s = clock() + self.seconds
            time.sleep(max(self.seconds - _OVERSLEEPS_S, 0.0))
        while clock() < until_s:
            pass


class Samples(torch.utils.data.Dataset):
    """Random numbers, read in batches."""

    def __init__(self, planted: Planted) -> None:
        draw = torch.Generator().manual_seed(1)
        self._x = torch.randn(2048, SIZE, generator=draw)
        self._planted = planted

    def __len__(self) -> int:
        return len(self._x)

    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        self._planted.meet("loading")
        return [self._x[number] for number in numbers]


def loss_of(planted: Planted):
    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            planted.meet("backward")
            return gradient

    def loss(model, batch):
        planted.meet("forward")
        return F.mse_loss(InBackward.apply(model(batch)), batch[:, :1])

    return loss


def made(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(SIZE, 4 * SIZE),
        nn.ReLU(),
        nn.Linear(4 * SIZE, SIZE),
        nn.ReLU(),
        nn.Linear(SIZE, 1),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


class OwnWork(unisono.callbacks.Callback):
    """Measures what this worker does in a step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, fit, step) -> None:
        times = fit.times(fit.rank, step.number)
        self.seconds.append(sum(times[1:]) - times.waiting_s)

    @property
    def undisturbed_s(self) -> float:
        return quantiles(self.seconds[10:], n=4)[0]


def train(directory, slow=None, phase="forward", how="sleep", part=0.2, *, steps=200, seed=0):
    """Train as one of several workers; says by how many seconds a step the slow one is slower."""
    planted, own = Planted(phase, how), OwnWork()
    options = {"shards": 2 * unisono.world().world_size, "seed": seed}
    measure = unisono.Trainer(*made(seed), loss_of(planted), callbacks=[own], **options)
    measure.fit(Samples(planted), batch_size=BATCH_SIZE, steps=MEASURED_STEPS)
    in_step_s = part * own.undisturbed_s
    if unisono.world().rank == slow:
        planted.seconds = in_step_s / 2  # it has two shards
    trainer = unisono.Trainer(*made(seed), loss_of(planted), directory=directory, **options)
    summary = trainer.fit(Samples(planted), batch_size=BATCH_SIZE, steps=steps)
    return in_step_s, summary.slowness


def train_in_a_loop(slow, steps=200):
    """The same with a loop of its own, and a worker that takes twice as long."""
    planted = Planted("forward", "busy")
    planted.seconds = 5e-3 * (unisono.world().rank == slow)
    model, optimizer = made()
    run = unisono.Run(model, optimizer, shards=2, seed=0)
    loss = loss_of(planted)
    for step in run.steps(Samples(planted), batch_size=BATCH_SIZE, steps=steps):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))


def findings(directory, until_step=200):
    """Read what runs have found while they were under way, each with the step when it did."""
    lines = (Path(directory) / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [
        one
        for event in events
        if event["event"] == "speed" and event["step"] <= until_step
        for one in event["speed"]["findings"]
    ]
