"""Checkpoints of one world, and of one exchange, resumed by another: the undisturbed run's bits."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from tests.gpu import cases
from tests.gpu.devices import launch
from tests.gpu.loops import train, trainer_of

SHARDS = 4
STOP, LAST = cases.STEPS_PER_EPOCH + 1, 2 * cases.STEPS_PER_EPOCH + 2
RECIPES: list[dict[str, Any]] = [
    {},
    {"precision": "fp16", "optimizer": "momentum", "way": "fused"},
    {"optimizer": "adafactor", "clip_norm": 0.05},
]


def train_in(
    folder: str, device: str, steps: int, options: dict[str, Any], case: str = "cnn"
) -> tuple[int, str]:
    """Train to so many steps in a run directory; returns the steps of this call, and the digest."""
    trainer = trainer_of(case, device, SHARDS, directory=folder, **options)
    summary = trainer.fit(cases.images(), batch_size=cases.BATCH_SIZE, steps=steps)
    return summary.steps, trainer.digest()


@pytest.mark.parametrize("options", RECIPES, ids=lambda options: options.get("optimizer", "adamw"))
def test_what_one_worker_has_written_two_and_four_resume(options, device, tmp_path):
    whole = train("cnn", device, SHARDS, LAST, **options)
    assert train_in(str(tmp_path / "one"), device, STOP, options)[0] == STOP
    for workers in (2, 4):
        there = tmp_path / str(workers)
        shutil.copytree(tmp_path / "one", there)
        results = launch(
            *(train_in, str(there), device, LAST, options), workers=workers, device=device
        )
        assert results == [(LAST - STOP, whole)] * workers


@pytest.mark.on_the_cpu_too
def test_what_two_workers_have_written_one_resumes(device, tmp_path):
    whole = train("cnn", device, SHARDS, LAST)
    there = str(tmp_path / "two")
    results = launch(train_in, there, device, STOP, {}, workers=2, device=device)
    assert [steps for steps, _ in results] == [STOP] * 2
    assert train_in(there, device, LAST, {}) == (LAST - STOP, whole)


@pytest.mark.parametrize(("name", "way"), cases.ROWS)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name, way, device, tmp_path):
    """Each optimizer has state of its own, some of it on the host."""
    if reason := cases.is_offered(name, way, device):
        pytest.skip(reason)
    options = {"optimizer": name, "way": way}
    whole = train("cnn", device, SHARDS, STOP + 2, **options)
    train_in(str(tmp_path), device, STOP, options)
    assert train_in(str(tmp_path), device, STOP + 2, options) == (2, whole)


@pytest.mark.needs_accelerator
def test_a_checkpoint_of_the_cpu_is_resumed_and_the_difference_is_told(device, tmp_path, capsys):
    """The run goes on, with other bits: the device belongs to what fixes them."""
    train_in(str(tmp_path), "cpu", STOP, {}, "cnn, small")
    trainer = trainer_of("cnn, small", device, SHARDS, directory=tmp_path)
    summary = trainer.fit(cases.images(), batch_size=cases.BATCH_SIZE, steps=LAST)
    assert summary.steps == LAST - STOP
    assert "in the checkpoint" in capsys.readouterr().out
    assert {parameter.device.type for parameter in trainer.run.model.parameters()} == {device}
