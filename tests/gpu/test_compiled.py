"""``model.compile()`` on the device: a plain compiled loop's bits, the same on two workers."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.devices import launch
from tests.gpu.loops import first_difference, plain_loop, train, unisono_loop

STEPS = 3  # an epoch's last batch has another shape, and costs another compilation

pytestmark = pytest.mark.timeout(240)


def compiled(thing):
    if hasattr(thing, "parameters"):
        thing.compile()
    return thing


def test_a_compiled_model_has_the_bits_of_a_plain_compiled_loop(device):
    """What torch compiles draws dropout in its own way, so the model has none that counts."""
    with torch._inductor.config.patch(compile_threads=1):
        theirs = plain_loop("gpt, certain", device, STEPS, prepare=compiled)
    ours = unisono_loop("gpt, certain", device, STEPS, prepare=compiled)
    assert first_difference(ours, theirs) is None


def test_the_same_bits_on_two_workers(device):
    alone = train("gpt", device, 2, STEPS, prepare=compiled)
    digests = launch(train_compiled, device, workers=2, device=device)
    assert digests == [alone] * 2


def train_compiled(device: str) -> str:
    return train("gpt", device, 2, STEPS, prepare=compiled)
