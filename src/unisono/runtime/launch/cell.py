"""Show a run in a notebook: one line in the cell, redrawn in place.

    in the kernel itself:   Trainer ──► Observed ──► Cell
    on workers:             Trainer ──► Observed ──► a message to the launcher ──► Cell

A cell keeps every printed line, so the bar is an updated display: a saved notebook contains
only its last state.

`DisplayState` and `Count` serve all displays.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from unisono.runtime.notices import decimal, duration

# Set in the environment of workers whose launcher draws their progress.
PROGRESS_VARIABLE = "UNISONO_PROGRESS"


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel: IPython with a front end to draw in."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def launcher_draws() -> bool:
    """Return whether the launcher of this worker draws its progress."""
    return PROGRESS_VARIABLE in os.environ


@final
class Observed:
    """Shows the progress of a run, a few times a second."""

    every_s = 0.25

    def __init__(self, draw: Callable[[DisplayState], None]) -> None:
        self._draw = draw
        self._shown: DisplayState | None = None

    def show(self, state: DisplayState) -> None:
        """Draw a state unless it is drawn already."""
        if state != self._shown:
            self._shown = state
            self._draw(state)

    start = show

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)

    def stop(self, state: DisplayState) -> None:
        """Draw the last state if the run is over."""
        # A worker that stops earlier may only have lost leadership to another worker.
        if state.is_over:
            self.show(state)


@final
class Cell:
    """Draws states into the cell that is being executed: one line per run."""

    def __init__(self) -> None:
        self._display_id = ""
        self._drawn: DisplayState | None = None

    def draw(self, state: DisplayState) -> None:
        """Draw `state` over the previous one; a different run gets a new line."""
        # A different run, not another worker's display of the same run.
        before = self._drawn
        is_new = (
            before is None or before.is_over or (not state.steps and state.total != before.total)
        )
        if is_new:
            self._display_id = os.urandom(16).hex()
        elif state.steps == 0:
            # A replacement does not know yet how far the others are.
            return
        # Not a dependency: installed wherever `in_notebook` returns True.
        importlib.import_module("IPython.display").display(
            {"text/plain": str(state)}, raw=True, display_id=self._display_id, update=not is_new
        )
        self._drawn = state


_BAR_WIDTH = 30

_FIRST_S = 10.0  # at most, before a run is drawn for the first time

# Returns the seconds of a monotonic clock.
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class DisplayState:
    """The progress of a run."""

    done: int  # completed steps of the whole run
    total: int  # steps of the whole run
    seconds: float = 0.0  # since the run began in this process
    steps: int = 0  # steps since then
    samples: int = 0  # samples since then
    epoch: int | None = None  # of the newest step, from 0; None before the first step
    loss: float = math.nan  # of the newest step

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return self.done >= self.total

    @property
    def epoch_and_loss(self) -> tuple[str, str]:
        """Epoch and loss of the newest step, as text."""
        return f"epoch {(self.epoch or 0) + 1}", f"loss {decimal(self.loss)}"

    def __str__(self) -> str:
        return self.line(_BAR_WIDTH)

    def line(self, bar_width: int) -> str:
        """Format the progress as one line, with a bar of `bar_width` characters."""
        share = self.done / self.total if self.total else 1.0
        full = min(bar_width, int(bar_width * share))
        words = ["━" * full + "─" * (bar_width - full), f"{self.done:,}/{self.total:,} steps"]
        if self.epoch is not None:
            epoch, loss = self.epoch_and_loss
            words = [epoch, *words, loss]
        if self.steps and self.seconds > 0:
            words.append(f"{self.samples / self.seconds:,.0f} samples/s")
        if self.steps and not self.is_over:
            left_s = self.seconds / self.steps * (self.total - self.done)
            words.append(f"{duration(math.ceil(left_s))} left")
        return "  ".join(words)


@final
class Count:
    """Counts the steps of a run, and decides when to show them."""

    def __init__(self, every_s: float, clock: Clock) -> None:
        self._every_s, self._clock = every_s, clock
        self._started_at = self._shown_at = 0.0
        self.state = DisplayState(0, 0)

    def start(self, done: int, total: int) -> DisplayState:
        """Start at step `done` of `total`."""
        self._started_at = self._clock()
        self._shown_at = self._started_at + min(_FIRST_S - self._every_s, 0.0)
        self.state = DisplayState(done, total)
        return self.state

    def step(self, epoch: int, loss: float, num_samples: int) -> DisplayState | None:
        """Count one step; return the progress if it is time to show it, else None."""
        now, last = self._clock(), self.state
        counts = last.steps + 1, last.samples + num_samples
        seconds = now - self._started_at
        self.state = DisplayState(last.done + 1, last.total, seconds, *counts, epoch, loss)
        if now - self._shown_at < self._every_s:
            return None
        self._shown_at = now
        return self.state
