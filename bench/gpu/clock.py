"""How long does a block of steps take, and whose turn is it? A side's end of the pipe.

Every side is a process of its own with an endless loop, which says ``clock.tick()`` after each
step. Between blocks it stands still there until its turn comes, so that sides which begin and end a
loop of their own (Lightning's, Unisono's) take turns as a bare loop does::

    turns.py   {"warmup": 5, "steps": 40, "setting": "on"} ─►  side
               ◄─ {"seconds": 0.41, "steps": 40, "peak_bytes": …}

Only one process computes at any time. The clock is read with the device idle before and after.
"""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

OFF, ON, TUNED = "off", "on", "benchmark"
"""Deterministic settings; `TUNED`: off, and cuDNN chooses what it finds to be fastest."""
SETTINGS = (OFF, ON, TUNED)
GO, SAID = "go", "said"


def choose_setting(setting: str) -> None:
    """Set torch's switches; bits of a bare loop are repeatable with `ON`."""
    torch.use_deterministic_algorithms(setting == ON)
    # Slow, and nothing reads what nobody wrote; Unisono has it off, too.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = setting == TUNED


class Clock:
    """Counts the steps of one side and reads the time when a block begins and ends. Final.

    Args:
        folder: has the pipes :data:`GO` and :data:`SAID`.
        device: whose work is waited for.
        keeps_settings: whether the side has settings of its own, which are left alone.
    """

    def __init__(self, folder: Path, device: torch.device, *, keeps_settings: bool) -> None:
        self._device, self._keeps_settings = device, keeps_settings
        self._go = open(folder / GO)  # noqa: SIM115 - until the process ends
        self._said = open(folder / SAID, "w")  # noqa: SIM115
        self._left = self._steps = 0
        self._is_timed = False
        self._start_s = 0.0

    def ready(self) -> None:
        """Tell that everything is made, and wait for the first turn."""
        self.say({"ready": True})
        self._wait_for_turn()

    def tick(self) -> None:
        """Count a step; where it ends a block, tell what that took and wait for the next turn."""
        self._left -= 1
        while self._left == 0:
            if self._is_timed:
                self._end_block()
                self._wait_for_turn()
            else:
                self._begin_block()

    def close(self) -> None:
        """Close this end of the pipes."""
        self._go.close()
        self._said.close()

    def say(self, what: dict[str, Any]) -> None:
        """Send one line."""
        self._said.write(json.dumps(what) + "\n")
        self._said.flush()

    def _wait_for_turn(self) -> None:
        line = self._go.readline()
        if not line:
            os._exit(0)  # nobody is there to take turns with
        order = json.loads(line)
        if not self._keeps_settings:
            choose_setting(order["setting"])
        self._is_timed, self._left, self._steps = False, order["warmup"], order["steps"]

    def _begin_block(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._is_timed, self._left = True, self._steps
        self._start_s = time.perf_counter()

    def _end_block(self) -> None:
        peak_bytes = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._start_s
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.empty_cache()  # the others need memory, too
        self.say({"seconds": seconds, "steps": self._steps, "peak_bytes": peak_bytes})
