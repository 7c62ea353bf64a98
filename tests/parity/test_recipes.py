"""Whole recipes: a precision, clipping and a cosine schedule together, with torch's bits."""

import contextlib
import functools
import itertools

import pytest
import torch
from tests.parity import cases
from tests.parity.plain import made, plain_loop
from torch.optim.lr_scheduler import CosineAnnealingLR

import unisono

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
RECIPES = list(itertools.product(PRECISIONS, ("step", "epoch")))
STEPS = 17  # of seven steps an epoch
CLIP_NORM = 0.05
cosine = functools.partial(CosineAnnealingLR, T_max=STEPS)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**22)  # so large that steps are skipped


def train(precision, interval, shards):
    model, data, loss, optimizer = made("cnn with norm", "adamw")
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=shards,
        seed=5,
        precision=precision,
        grad_scaler=scaler() if precision == "fp16" else None,
        clip_norm=CLIP_NORM,
        schedule=cosine(optimizer),
        schedule_every=interval,
    )
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=STEPS)
    return trainer.digest(), {name: value.clone() for name, value in model.state_dict().items()}


def digests(shards):
    return [train(*recipe, shards)[0] for recipe in RECIPES]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "interval"), RECIPES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # as a step is skipped
def test_one_shard_has_the_bits_of_a_plain_loop(precision, interval):
    dtype = PRECISIONS[precision]
    grad_scaler = torch.amp.GradScaler("cpu", enabled=False) if precision != "fp16" else scaler()

    def around():
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def update(value, model, optimizer):
        grad_scaler.scale(value).backward()
        grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        grad_scaler.step(optimizer)
        grad_scaler.update()

    model = plain_loop(
        "cnn with norm",
        "adamw",
        STEPS,
        around=around,
        update=update,
        schedule=cosine,
        schedule_every=interval,
    )
    _, seen = train(precision, interval, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(seen[name], value), name


@pytest.mark.slow
def test_the_same_bits_on_one_two_and_three_workers():
    alone = digests(4)
    assert len(set(alone)) == len(RECIPES)
    for workers in (2, 3):
        assert unisono.launch(digests, 4, workers=workers) == [alone] * workers
