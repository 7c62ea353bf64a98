"""Autocast is the same on any workers; its bits with one shard: parity/test_recipes.py."""

import pytest
import torch
from tests.classified import by_sign
from tests.classified import cross_entropy as loss

import unisono


def data():
    return by_sign(40, 6, seed=2)


def make(precision, shards, **options):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return unisono.Trainer(model, optimizer, loss, shards=shards, precision=precision, **options)


def train(precision, steps=8, **options):
    trainer = make(precision, 3, **options)
    trainer.fit(data(), batch_size=10, steps=steps, validate=data())
    rows = trainer.predict(data(), batch_size=10)
    return trainer.digest(), trainer.evaluate(data(), batch_size=10), rows.dtype


def test_forward_passes_compute_in_the_lower_precision():
    digests = {name: train(name)[::2] for name in ("fp32", "bf16", "fp16")}
    assert len({digest for digest, _ in digests.values()}) == 3
    assert [dtype for _, dtype in digests.values()][1:] == [torch.bfloat16, torch.float16]


@pytest.mark.slow
def test_a_checkpoint_of_another_precision_is_told(tmp_path, capsys):
    train("bf16", directory=tmp_path)
    train("fp32", directory=tmp_path)
    assert "precision was 'bf16' in the checkpoint and is 'fp32' now" in capsys.readouterr().out


ENABLED = torch.amp.GradScaler("cpu")
DISABLED = torch.amp.GradScaler("cpu", enabled=False)


@pytest.mark.parametrize(
    ("precision", "scaler", "words"),
    [
        ("fp8", None, r"`precision` must be one of \('fp32', 'bf16', 'fp16'\)"),
        ("bf16", ENABLED, r"must be left out unless the precision is \"fp16\", but that is 'bf16'"),
        ("fp16", DISABLED, "`scaler` must be enabled"),
    ],
)
def test_wrong_precisions_are_refused(precision, scaler, words):
    with pytest.raises(ValueError, match=words):
        unisono.Precision(precision, scaler=scaler)


def test_a_scaler_that_is_not_enabled_goes_with_any_other_precision():
    make(unisono.Precision(scaler=DISABLED), 1).fit(data(), batch_size=10, steps=1)
