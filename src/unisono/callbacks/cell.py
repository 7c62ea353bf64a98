"""How does a run look in a notebook? One line in the cell that is drawn again in its place.

    in the kernel itself:   Trainer ──► Observed ──► Cell
    on workers:             Trainer ──► Observed ──► a message to the launcher ──► Cell

A cell keeps every line that is printed, so the bar is a display that is updated: a saved notebook
holds its last state, and no more.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Set in the environment of workers whose launcher draws how far they are.
_VARIABLE = "UNISONO_PROGRESS"
_LAUNCHER = "launcher"
_REDRAW_EVERY_S = 0.25
_BAR_WIDTH = 30

Clock = Callable[[], float]


def in_notebook() -> bool:
    """Tell whether this process is a notebook's kernel: IPython with a front end to draw in."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def launcher_draws(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether a worker with these variables tells its launcher how far it is."""
    environ = os.environ if environ is None else environ
    return environ.get(_VARIABLE) == _LAUNCHER


def environment_of_workers(environ: Mapping[str, str], *, launcher_draws: bool) -> dict[str, str]:
    """Tell workers in their environment whether their launcher draws how far they are.

    One that does not, but was itself started by a worker, must not pass on that another did.
    """
    others = {name: value for name, value in environ.items() if name != _VARIABLE}
    return {**others, _VARIABLE: _LAUNCHER} if launcher_draws else others


@dataclass(frozen=True, slots=True)
class Sight:
    """How far a run is.

    Attributes:
        done: steps of the whole run.
        total: steps that it will have.
        seconds: since it was begun or gone on with, in seconds.
        steps: steps since then.
        samples: samples since then.
        epoch: of the newest step, counted from 0; None before the first.
        loss: of the newest step.
    """

    done: int
    total: int
    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    epoch: int | None = None
    loss: float = math.nan

    @property
    def is_over(self) -> bool:
        """Nothing will follow."""
        return self.done >= self.total

    def begins_another_than(self, before: Sight | None) -> bool:
        """Tell whether it begins another run than the one that `before` is of.

        A worker that shows the run in the place of one that was lost begins with the same total.
        """
        return before is None or before.is_over or (self.steps == 0 and self.total != before.total)

    def __str__(self) -> str:
        share = self.done / self.total if self.total else 1.0
        full = min(_BAR_WIDTH, int(_BAR_WIDTH * share))
        words = ["━" * full + "─" * (_BAR_WIDTH - full), f"{self.done:,}/{self.total:,} steps"]
        if self.epoch is not None:
            words.insert(0, f"epoch {self.epoch + 1}")
            words.append(f"loss {self.loss:.4f}")
        if self.steps and self.seconds > 0:
            words.append(f"{self.samples / self.seconds:,.0f} samples/s")
        if self.steps and not self.is_over:
            words.append(f"{_time(self.seconds / self.steps * (self.total - self.done))} left")
        return "  ".join(words)


class Observed:
    """Counts a run's steps and shows, a few times a second, how far it is. Final.

    Args:
        show: draws a sight, or has it drawn.
        clock: gives the time in seconds.
    """

    def __init__(self, show: Callable[[Sight], None], clock: Clock = time.monotonic) -> None:
        self._show = show
        self._clock = clock
        self._sight = Sight(0, 0)
        self._shown: Sight | None = None
        self._started_at = self._shown_at = 0.0

    def start(self, done: int, total: int) -> None:
        """See :class:`unisono.callbacks.display.Display`."""
        self._started_at = self._shown_at = self._clock()
        self._sight = Sight(done, total)
        self._show_now()

    def step(self, epoch: int, loss: float, num_samples: int) -> None:
        """See :class:`unisono.callbacks.display.Display`."""
        now, before = self._clock(), self._sight
        self._sight = Sight(
            before.done + 1,
            before.total,
            now - self._started_at,
            before.steps + 1,
            before.samples + num_samples,
            epoch,
            loss,
        )
        if now - self._shown_at >= _REDRAW_EVERY_S:
            self._shown_at = now
            self._show_now()

    def say(self, line: str) -> None:
        """See :class:`unisono.callbacks.display.Display`."""
        print(line, flush=True)

    def stop(self) -> None:
        """See :class:`unisono.callbacks.display.Display`."""
        # Who stops before the end may only have lost the lead; then another goes on.
        if self._sight.is_over:
            self._show_now()

    def _show_now(self) -> None:
        if self._sight != self._shown:
            self._shown = self._sight
            self._show(self._sight)


class Cell:
    """Draws sights into the cell that is being executed: one line for each run. Final."""

    def __init__(self) -> None:
        self._display_id = ""
        self._drawn: Sight | None = None

    def draw(self, sight: Sight) -> None:
        """Draw `sight` over the one before it; another run gets another line."""
        is_new = sight.begins_another_than(self._drawn)
        if is_new:
            self._display_id = os.urandom(16).hex()
        elif sight.steps == 0:
            # A replacement does not know yet how far the others are.
            return
        # Not a dependency: it is there where `in_notebook` says so.
        importlib.import_module("IPython.display").display(
            {"text/plain": str(sight)}, raw=True, display_id=self._display_id, update=not is_new
        )
        self._drawn = sight


def message_of(sight: Sight) -> dict[str, Any]:
    """Put a sight into a message to the launcher."""
    return {"type": "progress", "sight": asdict(sight)}


def sight_of(message: Mapping[str, Any]) -> Sight:
    """Take the sight out of a worker's message."""
    return Sight(**message["sight"])


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
