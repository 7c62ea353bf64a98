"""Workers that share one GPU: the bits of world size 1, in training, evaluation and prediction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu import cases
from tests.gpu.devices import launch
from tests.gpu.loops import train_all, trainer_of

SHARDS = 4
STEPS = cases.STEPS_PER_EPOCH + 3


def laid_out(thing: Any) -> Any:
    """Lay a model, or images, out with the channels last."""
    if isinstance(thing, torch.Tensor) and thing.ndim != 4:
        return thing
    return thing.to(memory_format=torch.channels_last)


# Each with what a run may be given besides; one launch computes them all.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("cnn", {}),
    ("cnn", {"optimizer": "momentum", "way": "fused", "prepare": laid_out}),
    ("cnn", {"precision": "bf16", "clip_norm": 0.05}),
    ("cnn", {"optimizer": "adafactor"}),
    ("gpt", {"way": "fused"}),
    ("gpt, a sum", {"clip_value": 1e-3}),
    ("gpt, recomputed", {"precision": "fp16"}),
]
OPTIMIZERS = [(name, way) for name, way in cases.ROWS if way in ("usual", "fused", "capturable")]


def check_on(workers, rows, device, steps=STEPS):
    given = [(case, {"steps": steps, **options}) for case, options in rows]
    alone = train_all(given, device, SHARDS)
    for digests in launch(train_all, given, device, SHARDS, workers=workers, device=device):
        told = dict(zip(map(str, rows), digests, strict=True))
        assert told == dict(zip(map(str, rows), alone, strict=True))


@pytest.mark.parametrize("workers", [2, 4])
def test_the_same_bits_on_one_two_and_four_workers(workers, device):
    check_on(workers, ROWS, device)


@pytest.mark.on_the_cpu_too
def test_the_same_bits_on_three_workers_that_do_not_divide_the_shards(device):
    check_on(3, ROWS[:1] + ROWS[4:5], device)


def test_every_optimizer_has_the_same_bits_on_two_workers(device):
    rows = [
        ("cnn", {"optimizer": name, "way": way})
        for name, way in OPTIMIZERS
        if cases.is_offered(name, way, device) is None
    ]
    check_on(2, rows, device, steps=3)


def look(device: str, precision: str) -> tuple[Any, list[Any], str]:
    """Train a little, then evaluate and predict; returns what must be the same everywhere."""
    trainer = trainer_of("cnn", device, SHARDS, precision=precision)
    data = cases.images()
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=2, validate=data)
    means = trainer.evaluate(data, batch_size=cases.BATCH_SIZE)
    rows = trainer.predict(data, batch_size=cases.BATCH_SIZE)
    assert len(rows) == len(data)
    return means, rows.float().cpu().tolist(), trainer.digest()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_and_prediction_are_the_same_on_one_two_and_four_workers(precision, device):
    alone = look(device, precision)
    for workers in (2, 4):
        assert launch(look, device, precision, workers=workers, device=device) == [alone] * workers
