"""Runs whose loops alternate step by step are exact, or refused at their first step."""

import pytest
import torch
from tests.promises import promise
from torch import nn
from torch.nn import functional as F

import unisono

BATCH_SIZE, STEPS = 16, 12


def made(directory=None, **options):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8) + 1)
    runs = [
        unisono.Run(
            model,
            torch.optim.Adam(model.parameters(), lr=1e-2),
            shards=4,
            directory=directory and directory / name,
            **options,
        )
        for name, model in (("generator", generator), ("discriminator", discriminator))
    ]
    return runs, data


def step_by_step(directory=None, steps=STEPS, **options):
    """Train both, one step each; returns the sums of their parameters, and their steps."""
    (first, second), data = made(directory, **options)
    generator, discriminator = first.model, second.model
    loops = [run.steps(data, batch_size=BATCH_SIZE, steps=steps) for run in (first, second)]
    for of_generator, of_discriminator in zip(*loops, strict=True):
        with of_generator:
            for (real,) in of_generator.shards:
                made_up = generator(torch.randn(len(real), 4))
                of_generator.backward(-discriminator(made_up).mean())
                discriminator.zero_grad()
        with of_discriminator:
            for (real,) in of_discriminator.shards:
                with torch.no_grad():
                    made_up = generator(torch.randn(len(real), 4))
                away = F.softplus(-discriminator(real)) + F.softplus(discriminator(made_up))
                of_discriminator.backward(away.mean())
    totals = [
        sum(p.double().sum().item() for p in model.parameters())
        for model in (generator, discriminator)
    ]
    return totals, first.position.step, second.position.step


def one_after_the_other(directory=None):
    """Train a discriminator within each step of the generator, each time to its end."""
    (first, second), data = made(directory)
    for step in first.steps(data, batch_size=BATCH_SIZE, steps=3):
        with step:
            for (real,) in step.shards:
                step.backward(first.model(real[:, :4]).square().mean())
        for inner in second.steps(data, batch_size=BATCH_SIZE, steps=2 * (step.number + 1)):
            with inner:
                for (real,) in inner.shards:
                    inner.backward(second.model(real).square().mean())
    totals = [
        sum(p.double().sum().item() for p in run.model.parameters()) for run in (first, second)
    ]
    return second.position.step, totals


@promise("where-it-ends.5")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loops_that_take_turns_are_exact_without_recovery(workers):
    alone = step_by_step()
    assert alone[1:] == (STEPS, STEPS)
    assert unisono.launch(step_by_step, workers=workers, restarts=0) == [alone] * workers


@promise("where-it-ends.5")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_loops_that_take_turns_are_refused_at_their_first_step_where_workers_recover(workers):
    with pytest.raises(RuntimeError, match=r"alternate step by step: .*`restarts=0`"):
        unisono.launch(step_by_step, workers=workers)


@promise("where-it-ends.5")
@pytest.mark.parametrize("with_directory", [0, 1])
def test_loops_that_take_turns_are_refused_where_a_run_has_a_directory(tmp_path, with_directory):
    runs, data = made()
    runs[with_directory] = made(tmp_path)[0][with_directory]
    first, second = (run.steps(data, batch_size=16, steps=3) for run in runs)
    for run, loop in zip(runs, (first, second), strict=True):
        with next(loop) as step:
            for (real,) in step.shards:
                step.backward(run.model(real[:, : run.model[0].in_features]).square().mean())
    with pytest.raises(RuntimeError, match="leave `directory` out of both runs"):
        next(first)
    second.close()
    assert [run.position.step for run in runs] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_that_ends_within_each_step_of_another_has_memory_of_its_own(tmp_path, workers):
    alone = one_after_the_other(tmp_path / "one")
    assert alone[0] == 6
    found = unisono.launch(one_after_the_other, tmp_path / "others", workers=workers)
    assert found == [alone] * workers
