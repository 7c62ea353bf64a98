"""A loop's first snapshot, which waits for late workers, does not put off the next ones."""

import time

import pytest
import torch
from tests.promises import promise
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.engine.step.between_steps import BetweenSteps


def snapshots_of_two_seconds():
    take, taken = BetweenSteps.take_snapshot, []

    def slow_at_first(between, *args, **options):
        time.sleep(0.1 * (not taken))
        taken.append(True)
        return take(between, *args, **options)

    BetweenSteps.take_snapshot = slow_at_first
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), 0.1), shards=2)
    until_s = time.monotonic() + 2.0
    for step in run.steps(TensorDataset(torch.randn(64, 4)), batch_size=8, steps=400):
        with step:
            for (rows,) in step.shards:
                step.backward(model(rows).square().mean())
        time.sleep(0.02 if time.monotonic() < until_s else 0)
    return len(taken)


@pytest.mark.slow
def test_a_slow_first_snapshot_is_followed_by_another_soon():
    # One at the start and one at the end; between them, those whose pace it is.
    assert min(unisono.launch(snapshots_of_two_seconds, workers=2)) > 2


def snapshots_of_three_steps():
    take, taken = BetweenSteps.take_snapshot, []
    BetweenSteps.take_snapshot = lambda *args, **options: taken.append(1) or take(*args, **options)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), 0.1), shards=2)
    for step in run.steps(TensorDataset(torch.randn(64, 4)), batch_size=8, steps=3):
        with step:
            for (rows,) in step.shards:
                step.backward(model(rows).square().mean())
    BetweenSteps.take_snapshot = take
    return len(taken)


@promise("nothing-lost.17")
@pytest.mark.slow
def test_there_are_no_snapshots_without_restarts():
    assert min(unisono.launch(snapshots_of_three_steps, workers=2)) >= 2
    assert unisono.launch(snapshots_of_three_steps, workers=2, restarts=0) == [0, 0]
