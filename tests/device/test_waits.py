"""The host waits for the device at the places that are named here, and at no others."""

import contextlib

import pytest
import torch
from tests.accelerator import sim
from tests.chaos.exchanges import ACCELERATED, skip_without
from tests.device import unusual, waits
from tests.once import computed_once

import unisono
from unisono.runtime.device import Device

# Once a step, before the workers first meet: losses are there then, and parts on the host.
ALONE = ["loss.py:PendingLosses.read"]
# And once more before they meet again: each has added up a slice then.
TOGETHER = [*ALONE, "staged.py:StagedExchange.add_up"]
MODELS = [
    {"norm": True, "dropout": 0.2},
    {"norm": False, "dropout": 0.0},
]


@pytest.mark.slow
@pytest.mark.parametrize("loss", waits.LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_a_trainer_waits_once_a_step(accelerator, loss, model):
    assert waits.waits_of_trainer(loss, **model) == [ALONE] * waits.WATCHED


@pytest.mark.slow
@pytest.mark.parametrize("loss", waits.LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_waits_once_a_step(accelerator, loss, model):
    assert waits.waits_of_run(loss, **model) == [ALONE] * waits.WATCHED


@pytest.mark.slow
def test_autocast_adds_no_wait(accelerator):
    assert waits.waits_of_trainer(precision="bf16") == [ALONE] * waits.WATCHED


@pytest.mark.slow
def test_clipping_by_value_adds_no_wait(accelerator):
    assert waits.waits_of_trainer(clip_value=0.1) == [ALONE] * waits.WATCHED


@pytest.mark.slow
def test_clipping_by_norm_reads_one_number(accelerator):
    norm = "item: transforms.py:NormClipping.apply"
    for step in waits.waits_of_trainer(clip_norm=0.1):
        assert sorted(step) == sorted([*ALONE, norm])


@pytest.mark.slow
def test_scaled_losses_read_one_number(accelerator):
    finite = "item: transforms.py:LossScaling.unscale"
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


def test_memory_that_is_copied_is_not_given_to_others(accelerator):
    device = Device(torch.device("sim", 0))
    copies, host = device.copies(), torch.zeros(1000).pin_memory()
    copies.to_host(host, torch.ones(1000, device=device.torch))
    torch.zeros(1000, device=device.torch)  # raises where it could be the same memory
    copies.wait()
    assert host.all()


@computed_once()
def test_nothing_is_under_way_when_a_loop_fails(accelerator):
    def loss(model, batch):
        if len(calls) == 2:
            raise KeyError("a loss that fails")
        calls.append(1)
        return unusual.loss_of(model, batch)

    calls = []
    with contextlib.suppress(KeyError):
        unusual.make("sim", loss=loss).fit(unusual.data(40), **unusual.FIT)
    assert sim.pending_copies(0) == 0
