"""How does a run look in a notebook? One line in the cell that is drawn again in its place.

    in the kernel itself:   Trainer ──► Observed ──► Cell
    on workers:             Trainer ──► Observed ──► a message to the launcher ──► Cell

A cell keeps every line that is printed, so the bar is a display that is updated: a saved notebook
holds its last state, and no more.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping

from unisono.callbacks.display_state import Clock, Count, DisplayState

# Set in the environment of workers whose launcher draws how far they are.
_VARIABLE = "UNISONO_PROGRESS"
_LAUNCHER = "launcher"
_REDRAW_EVERY_S = 0.25


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


class Observed:
    """Shows, a few times a second, how far a run is. Final.

    Args:
        show: draws a sight, or has it drawn.
        clock: gives the time in seconds.
    """

    def __init__(self, show: Callable[[DisplayState], None], clock: Clock = time.monotonic) -> None:
        self._show = show
        self._count = Count(_REDRAW_EVERY_S, clock)
        self._shown: DisplayState | None = None

    def start(self, done: int, total: int) -> None:
        """See :class:`unisono.callbacks.display.Display`."""
        self._show_now(self._count.start(done, total))

    def step(self, epoch: int, loss: float, num_samples: int) -> None:
        """See :class:`unisono.callbacks.display.Display`."""
        sight = self._count.step(epoch, loss, num_samples)
        if sight is not None:
            self._show_now(sight)

    def say(self, line: str) -> None:
        """See :class:`unisono.callbacks.display.Display`."""
        print(line, flush=True)

    def stop(self) -> None:
        """See :class:`unisono.callbacks.display.Display`."""
        # Who stops before the end may only have lost the leader; then another goes on.
        if self._count.sight.is_over:
            self._show_now(self._count.sight)

    def _show_now(self, sight: DisplayState) -> None:
        if sight != self._shown:
            self._shown = sight
            self._show(sight)


class Cell:
    """Draws sights into the cell that is being executed: one line for each run. Final."""

    def __init__(self) -> None:
        self._display_id = ""
        self._drawn: DisplayState | None = None

    def draw(self, sight: DisplayState) -> None:
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
