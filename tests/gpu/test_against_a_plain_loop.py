"""World size 1 with one shard: the bits of a plain loop on the same device."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.gpu import cases
from tests.gpu.devices import CUDA, deterministic, settings
from tests.gpu.loops import (
    first_difference,
    plain_loop,
    train,
    trainer_of,
    unisono_loop,
    weights_of,
)
from tests.loaders import loader_of
from tests.once import computed_once
from tests.parity.plain import update_by

import unisono

STEPS = cases.STEPS_PER_EPOCH + 2
SCALED_STEPS = 12
FIRST = {"cnn": "first.weight", "gpt": "tokens.weight"}
EVERY_CASE = ["cnn", "gpt", "gpt, recomputed"]


@pytest.mark.on_the_cpu_too
@pytest.mark.parametrize("case", EVERY_CASE)
def test_one_shard_has_the_bits_of_a_plain_loop(case, device):
    theirs = plain_loop(case, device, STEPS)
    assert first_difference(unisono_loop(case, device, STEPS), theirs) is None


def test_a_run_repeats_itself_whatever_the_device_has_computed_before(device):
    first = train("cnn", device, 4, STEPS)
    junk = torch.randn(257, 129, device=device)
    (junk @ junk.t()).sum().item()
    torch.manual_seed(99)
    torch.rand(3, device=device)
    assert train("cnn", device, 4, STEPS) == first


@pytest.mark.parametrize("case", ["cnn", "gpt"])
def test_bfloat16_has_the_bits_of_torchs_autocast(case, device):
    def around():
        return torch.autocast(device, torch.bfloat16)

    theirs = plain_loop(case, device, STEPS, around=around)
    assert first_difference(unisono_loop(case, device, STEPS, precision="bf16"), theirs) is None


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("cnn", {}),
        ("gpt", {}),
        # Not with momentum: torch's fused SGD reads what nobody wrote if it skips the first step.
        *(("cnn", {"optimizer": optimizer, "way": "fused"}) for optimizer in ("adamw", "sgd")),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_float16_has_the_bits_of_torchs_scaler(case, how, device):
    """The scale is so large at first that steps are skipped."""
    scaler, ours = (torch.amp.GradScaler(device, init_scale=2.0**22) for _ in range(2))

    def around():
        return torch.autocast(device, torch.float16)

    update = update_by(scaler=scaler)
    theirs = plain_loop(case, device, SCALED_STEPS, around=around, update=update, **how)
    precision = unisono.Precision("fp16", scaler=ours)
    found = unisono_loop(case, device, SCALED_STEPS, precision=precision, **how)
    assert first_difference(found, theirs) is None
    begun = weights_of(cases.CASES[case].model(device))
    assert not torch.equal(begun[FIRST[case]], theirs[FIRST[case]])  # some steps were not


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("case", ["cnn", "gpt"])
def test_tf32_is_allowed_or_forbidden(case, tf32, device):
    with tf32_allowed(tf32):
        before = settings()
        ours = unisono_loop(case, device, STEPS)
        assert settings() == before
        theirs = plain_loop(case, device, STEPS)
    assert first_difference(ours, theirs) is None
    if device == CUDA:
        with tf32_allowed(not tf32):
            other = unisono_loop(case, device, STEPS)
        assert first_difference(ours, other) is not None


@contextlib.contextmanager
def tf32_allowed(is_allowed):
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_channels_last_has_the_bits_of_torchs(precision, device):
    def prepare(thing):
        is_image = not isinstance(thing, torch.Tensor) or thing.ndim == 4
        return thing.to(memory_format=torch.channels_last) if is_image else thing

    def around():
        is_low = precision == "bf16"
        return torch.autocast(device, torch.bfloat16) if is_low else contextlib.nullcontext()

    theirs = plain_loop("cnn", device, STEPS, prepare=prepare, around=around)
    ours = unisono_loop("cnn", device, STEPS, prepare=prepare, precision=precision)
    assert first_difference(ours, theirs) is None


@pytest.mark.on_the_cpu_too
@pytest.mark.parametrize(
    ("case", "way", "options"),
    [
        ("cnn", "usual", {"clip_norm": 0.05}),
        ("cnn", "fused", {"clip_norm": 0.05}),
        ("gpt", "usual", {"clip_value": 1e-3}),
    ],
)
def test_clipping_has_the_bits_of_torchs(case, way, options, device):
    theirs = plain_loop(case, device, STEPS, update=update_by(**options), way=way)
    assert first_difference(unisono_loop(case, device, STEPS, way=way, **options), theirs) is None


@computed_once()
def test_a_batch_is_on_the_device_pinned_or_not(device):
    seen = []

    def loss(model, batch):
        seen.append({part.device.type for part in batch})
        return cases.classify(model, batch)

    digests = []
    for pinned in (False, True):
        trainer = trainer_of("cnn", device, 1, loss=loss)
        trainer.fit(loader_of(cases.images(), cases.BATCH_SIZE, pin_memory=pinned), steps=3)
        digests.append(trainer.digest())
    assert digests[0] == digests[1]
    assert set().union(*seen) == {device}


@pytest.mark.on_the_cpu_too
@computed_once()
def test_settings_of_torch_are_put_back(device):
    before = settings()
    inside = []

    def loss(model, batch):
        inside.append(settings())
        return cases.classify(model, batch)

    trainer = trainer_of("cnn", device, 1, loss=loss)
    trainer.fit(cases.images(), batch_size=cases.BATCH_SIZE, steps=2)
    assert settings() == before
    if device == CUDA:
        with deterministic():
            assert inside[0][:4] == settings()[:4]
