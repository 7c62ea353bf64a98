"""One result in every way: alone, on 1, 2, 3 workers, with two kills, stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.replacements import JOINED, wait_for_replacement

import unisono
from unisono.callbacks import Callback
from unisono.runtime.workers.context import context

STEPS = 8
KILLS = "kill:rank=0,step=2,at=update; kill:rank=1,step=4"

Train = Callable[[int, Any], Any]
"""Trains to a step, with checkpoints in a folder or None; at module level, as workers import it."""


class Waits(Callback):
    """Let a replacement join before the next step."""

    def on_step_begin(self, fit: Any) -> None:
        wait_for_replacement(context().team())


def one_result(train: Train, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Check that a program comes to the same result in every way; return it."""
    alone = train(STEPS, None)
    for workers in (1, 2, 3):
        assert unisono.launch(train, STEPS, None, workers=workers) == [alone] * workers
    assert unisono.launch(train, STEPS // 2, folder, workers=3)
    assert train(STEPS, folder) == alone, "resumed"
    joined = folder / "joined"
    joined.mkdir(exist_ok=True)
    monkeypatch.setenv(JOINED, str(joined))
    monkeypatch.setenv("UNISONO_FAULTS", KILLS)
    assert unisono.launch(train, STEPS, None, workers=2) == [alone] * 2, "killed"
    monkeypatch.delenv("UNISONO_FAULTS")
    assert {each.name for each in joined.iterdir()} == {"0", "1"}, "the kills prove nothing"
    return alone
