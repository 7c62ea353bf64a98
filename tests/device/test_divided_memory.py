"""What a worker with a replica holds on its device, beside the formula that docs/gpus.md has."""

import pytest
import torch
from tests.accelerator import sim
from torch import nn
from torch.utils.data import TensorDataset

import unisono

STEPS, WIDTH = 5, 1500


def peak_of(clip_norm):
    """Train on this worker's device; gives the peak of a step, and the bytes of the parameters."""
    sim.install()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    options = {"shards": unisono.world().world_size, "clip_norm": clip_norm, "device": "sim"}
    run = unisono.Run(model, optimizer, **options)
    peak, index = 0, run.device.torch.index
    for step in run.steps(TensorDataset(torch.randn(24, 30)), batch_size=8, steps=STEPS):
        if step.number == 2:
            torch.sim.reset_peak_memory_stats(index)
        peak = torch.sim.max_memory_allocated(index)
        with step:
            for (inputs,) in step.shards:
                step.backward(model(inputs).square().mean())
    assert torch.sim.memory_allocated(index) <= peak  # with the whole state, but no parts
    return peak, sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "workers", "clip_norm", "times"),
    [
        # parameters, gradients, this worker's part; others' slices, sums; state
        pytest.param("staged", 2, None, 3 + 1 / 2 + 1 + 2, marks=pytest.mark.long),
        ("zero", 2, None, 3 + 1 / 2 + 2 / 2),
        pytest.param("zero", 2, 1.0, 3 + 1 / 2 + 1 + 2 / 2, marks=pytest.mark.long),
        pytest.param("zero", 3, None, 3 + 2 / 3 + 2 / 3, marks=pytest.mark.long),
    ],
)
def test_a_worker_holds_what_the_formula_says(monkeypatch, exchange, workers, clip_norm, times):
    if reason := sim.why_not():
        pytest.skip(reason)
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    for peak, parameters in unisono.launch(peak_of, clip_norm, workers=workers):
        assert peak == pytest.approx(times * parameters, rel=0.1)
