"""Shows a run in a notebook: one line in the cell, redrawn in place.

    in the kernel itself:   Trainer ──► Observed ──► Cell
    on workers:             Trainer ──► Observed ──► a message to the launcher ──► Cell

A cell keeps every line that is printed, so the bar is a display that is updated: a saved notebook
holds its last state alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping

from unisono.callbacks.display_state import DisplayState

# Set in the environment of workers whose launcher draws how far they are.
_VARIABLE = "UNISONO_PROGRESS"
_LAUNCHER = "launcher"


def in_notebook() -> bool:
    """Tell whether this process is a notebook's kernel: IPython with a front end to draw in."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def launcher_draws(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the launcher of a worker with these variables draws its progress."""
    environ = os.environ if environ is None else environ
    return environ.get(_VARIABLE) == _LAUNCHER


def environment_of_workers(environ: Mapping[str, str], *, launcher_draws: bool) -> dict[str, str]:
    """Set for workers whether their launcher draws their progress, whatever it inherited itself."""
    others = {name: value for name, value in environ.items() if name != _VARIABLE}
    return {**others, _VARIABLE: _LAUNCHER} if launcher_draws else others


class Observed:
    """Shows, a few times a second, how far a run is. Final.

    Args:
        draw: draws a state, or has it drawn.
    """

    every_s = 0.25

    def __init__(self, draw: Callable[[DisplayState], None]) -> None:
        self._draw = draw
        self._shown: DisplayState | None = None

    def start(self, state: DisplayState) -> None:
        """See :class:`unisono.callbacks.progress.Display`."""
        self.show(state)

    def show(self, state: DisplayState) -> None:
        """See :class:`unisono.callbacks.progress.Display`."""
        if state != self._shown:
            self._shown = state
            self._draw(state)

    def say(self, line: str) -> None:
        """See :class:`unisono.callbacks.progress.Display`."""
        print(line, flush=True)

    def stop(self, state: DisplayState) -> None:
        """See :class:`unisono.callbacks.progress.Display`."""
        # A worker that stops before the end may only have lost the lead; then another goes on.
        if state.is_over:
            self.show(state)


class Cell:
    """Draws states into the cell that is being executed: one line for each run. Final."""

    def __init__(self) -> None:
        self._display_id = ""
        self._drawn: DisplayState | None = None

    def draw(self, state: DisplayState) -> None:
        """Draw `state` over the one before it; another run gets another line."""
        is_new = state.begins_another_than(self._drawn)
        if is_new:
            self._display_id = os.urandom(16).hex()
        elif state.steps == 0:
            # A replacement does not know yet how far the others are.
            return
        # Not a dependency: it is there where `in_notebook` says so.
        importlib.import_module("IPython.display").display(
            {"text/plain": str(state)}, raw=True, display_id=self._display_id, update=not is_new
        )
        self._drawn = state
