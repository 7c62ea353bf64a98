"""Optimizers that count their steps on the device: refused on CPUs, torch's bits on devices."""

from __future__ import annotations

import pytest
import torch
from tests.gpu import cases
from tests.gpu.loops import first_difference, plain_loop, trainer_of, unisono_loop

import unisono

STEPS = 7
CAPTURABLE = [name for name, way in cases.ROWS if way == "capturable"]


def test_it_is_refused_on_the_cpu():
    with pytest.raises(ValueError, match="`capturable` must be off on CPU workers"):
        trainer_of("cnn", "cpu", 1, optimizer="adam", way="capturable")


def test_differentiable_updates_are_refused_everywhere(accelerator):
    for device in ("cpu", "sim"):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
        with pytest.raises(ValueError, match="`differentiable` must be off"):
            unisono.Trainer(model, optimizer, cases.classify, shards=1, device=device)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURABLE)
def test_on_a_device_one_shard_has_the_bits_of_a_plain_loop(name, accelerator):
    torch.set_num_threads(1)
    how = {"optimizer": name, "way": "capturable"}
    theirs = plain_loop("cnn", "sim", STEPS, **how)
    assert first_difference(unisono_loop("cnn", "sim", STEPS, **how), theirs) is None
