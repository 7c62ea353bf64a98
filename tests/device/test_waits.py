"""The host waits for the device at the places that are named here, and at no others."""

import pytest
from tests.chaos.exchanges import ACCELERATED, skip_without
from tests.device import waits
from tests.device.small import ALONE, TOGETHER

import unisono

MODELS = [
    {"norm": True, "dropout": 0.2},
    {"norm": False, "dropout": 0.0},
]


@pytest.mark.parametrize("loss", waits.LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_a_trainer_waits_once_a_step(accelerator, loss, model):
    assert waits.waits_of_trainer(loss, **model) == [ALONE] * waits.WATCHED


@pytest.mark.parametrize("loss", waits.LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_waits_once_a_step(accelerator, loss, model):
    assert waits.waits_of_run(loss, **model) == [ALONE] * waits.WATCHED


def test_autocast_adds_no_wait(accelerator):
    assert waits.waits_of_trainer(precision="bf16") == [ALONE] * waits.WATCHED


def test_clipping_by_value_adds_no_wait(accelerator):
    assert waits.waits_of_trainer(clip_value=0.1) == [ALONE] * waits.WATCHED


def test_clipping_by_norm_reads_one_number(accelerator):
    norm = "item: engine.py:StepEngine._clip"
    for step in waits.waits_of_trainer(clip_norm=0.1):
        assert sorted(step) == sorted([*ALONE, norm])


def test_scaled_losses_read_one_number(accelerator):
    finite = "item: scaling.py:LossScaling.unscale"
    for step in waits.waits_of_trainer(precision="fp16"):
        assert sorted(step) == sorted([*ALONE, finite])


def of_all(options):
    return [waits.waits_of_trainer(**options), waits.waits_of_run()]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "loss": "sums"}])
def test_workers_wait_twice_a_step(workers, options):
    skip_without(ACCELERATED)
    # Without recovery there are no snapshots, which wait.
    for found in unisono.launch(of_all, options, workers=workers, restarts=0):
        assert found == [[TOGETHER] * waits.WATCHED] * 2
