"""Workers that share a GPU are killed: the bits of the undisturbed run; their memory is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu import cases
from tests.gpu.devices import launch
from tests.gpu.loops import train, trainer_of
from tests.replacements import wait_for_replacement

SHARDS = 4
STEPS = 16
HOLD = (5, 10, 14)  # in these the others wait for replacements
# One launch kills each rank once; every phase of a step comes in one of them.
TABLES = [
    "kill:rank=0,step=2,at=begin; kill:rank=1,step=7,at=shard; kill:rank=2,step=12,at=gradients",
    "kill:rank=2,step=3,at=update; kill:rank=0,step=8,at=updated; kill:rank=1,step=12,at=commit",
    "kill:rank=1,step=0,at=gradients; kill:rank=0,step=4,at=update; kill:rank=2,step=15,at=updated",
    "kill:rank=0,step=6,at=gradients; kill:rank=1,step=6,at=update; kill:rank=2,step=11,at=begin",
]


def train_and_hold(device: str, hold: tuple[int, ...], **options: Any) -> tuple[str, int]:
    """Train; in some steps wait until everybody is there again. Returns digest and steps done."""

    def loss(model: torch.nn.Module, batch: Any) -> Any:
        if trainer.run.position.step in hold:
            wait_for_replacement(trainer.run._context.team)
        return cases.classify(model, batch)

    trainer = trainer_of("cnn", device, SHARDS, loss=loss, **options)
    trainer.fit(cases.images(), batch_size=cases.BATCH_SIZE, steps=STEPS)
    return trainer.digest(), trainer.run.position.step


@pytest.mark.parametrize("faults", TABLES)
def test_a_worker_killed_in_any_phase_changes_nothing(faults, device, monkeypatch, capfd):
    alone = train("cnn", device, SHARDS, STEPS)
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    results = launch(train_and_hold, device, HOLD, workers=3, device=device, restarts=20)
    said = capfd.readouterr().err
    assert results == [(alone, STEPS)] * 3, said
    assert said.count("was killed by SIGKILL") == faults.count("kill"), said


def test_a_replacement_is_killed_too(device, monkeypatch, capfd):
    alone = train("cnn", device, SHARDS, STEPS, optimizer="adafactor")
    faults = "kill:rank=1,step=2; kill:rank=1,at=join; kill:rank=0,step=11,at=updated"
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    results = launch(train_and_hold_adafactor, device, workers=2, device=device, restarts=20)
    said = capfd.readouterr().err
    assert results == [(alone, STEPS)] * 2, said
    assert said.count("was killed by SIGKILL") == 3, said


def train_and_hold_adafactor(device: str) -> tuple[str, int]:
    return train_and_hold(device, HOLD, optimizer="adafactor")


@pytest.mark.on_the_cpu_too
def test_the_others_go_on_without_one_that_is_not_replaced(device, monkeypatch, capfd):
    alone = train("cnn", device, SHARDS, STEPS)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=4,at=gradients")
    results = launch(
        *(train_and_hold, device, ()), workers=2, device=device, restarts=20, replace=False
    )
    assert results == [(alone, STEPS), None], capfd.readouterr().err
