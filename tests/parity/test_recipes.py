"""Whole recipes: a precision, clipping and a cosine schedule together, with torch's bits."""

import contextlib
import functools
import itertools

import pytest
import torch
from tests.parity.plain import check_bits, plain_loop, trained, update_by
from torch.optim.lr_scheduler import CosineAnnealingLR

import unisono

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
RECIPES = list(itertools.product(PRECISIONS, ("step", "epoch")))
STEPS = 17  # of seven steps an epoch
CLIP_NORM = 0.05
cosine = functools.partial(CosineAnnealingLR, T_max=STEPS)
# Optimizers that are updated in pieces, and whole by the leader.
OPTIMIZERS = ("adamw", "adafactor")
CLIPS = ({"clip_norm": CLIP_NORM}, {"clip_value": 0.003})


def scaler(**options):
    """Begin with a scale so large that steps are skipped."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**22, **options)


def train(precision, interval, shards):
    if precision == "fp16":
        precision = unisono.Precision("fp16", scaler=scaler())
    options = {"schedule": cosine, "schedule_every": interval, "clip_norm": CLIP_NORM}
    return trained("cnn with norm", "adamw", shards, STEPS, precision=precision, **options)


def found_by_all():
    """Train in all ways; gives digests, and the scale of losses in the end."""
    found = [train(*recipe, 4).digest() for recipe in RECIPES]
    for optimizer, clip in itertools.product(OPTIMIZERS, CLIPS):
        found.append(trained("cnn", optimizer, 4, 7, **clip).digest())
    for optimizer in OPTIMIZERS:
        grad_scaler = scaler(growth_interval=3)
        precision = unisono.Precision("fp16", scaler=grad_scaler)
        options = {"precision": precision, "clip_norm": CLIP_NORM}
        found.append(trained("cnn", optimizer, 4, 12, **options).digest())
        found.append(grad_scaler.state_dict())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "interval"), RECIPES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # as a step is skipped
def test_one_shard_has_the_bits_of_a_plain_loop(precision, interval):
    dtype = PRECISIONS[precision]

    def around():
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    update = update_by(clip_norm=CLIP_NORM, scaler=scaler() if precision == "fp16" else None)
    options = {"schedule": cosine, "schedule_every": interval}
    model = plain_loop("cnn with norm", "adamw", STEPS, around=around, update=update, **options)
    check_bits(train(precision, interval, 1), model)


@pytest.mark.slow
def test_the_same_bits_on_one_two_and_three_workers():
    alone = found_by_all()
    assert len(set(map(str, alone))) >= len(alone) - 1  # one scale for both optimizers
    assert alone[-1]["scale"] < 2.0**22
    for workers in (2, 3):
        assert unisono.launch(found_by_all, workers=workers) == [alone] * workers
