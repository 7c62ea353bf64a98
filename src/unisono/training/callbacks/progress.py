"""The callback that displays a run: a bar on a terminal, lines elsewhere, one line in a notebook.

A run that can no longer be displayed (a full disk, a pipe that nobody reads, an output that the
program has closed or replaced) continues.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeAlias, final

from unisono.runtime.device import generators_put_back
from unisono.runtime.launch.cell import (
    Cell,
    Clock,
    Count,
    DisplayState,
    Observed,
    in_notebook,
    launcher_draws,
)
from unisono.runtime.notices import say, shown_lines
from unisono.runtime.workers.context import context
from unisono.runtime.workers.launcher_messages import ShowProgress
from unisono.runtime.workers.supervisor import has_launcher
from unisono.training.callbacks.callback import Callback, DoneStep, Fit
from unisono.training.callbacks.summary import Summary

with generators_put_back():  # draws on import, maybe after the program's seed
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from unisono.runtime.console import Output

_BAR_WIDTH = 30


def display(console: Console | None = None) -> Display:
    """Return what to display a run on: the notebook's cell, a bar, or lines."""
    if console is None:
        if launcher_draws() and has_launcher():
            supervisor = context().supervisor
            return Observed(lambda state: supervisor.notify(ShowProgress(asdict(state))))
        if in_notebook():
            return Observed(Cell().draw)
        console = Output()
    can_redraw = console.is_terminal and not console.is_dumb_terminal
    return Bar(console) if can_redraw else Lines(console)


class _OnConsole:
    """Prints a display's lines on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """Print one line that stays."""
        # Some encodings lack characters such as → and ×.
        encoding = getattr(self._console.file, "encoding", None) or "utf-8"
        fitting = shown_lines(line).encode(encoding, "replace").decode(encoding)
        self._console.print(fitting, highlight=False, markup=False, soft_wrap=True)


@final
class Lines(_OnConsole):
    """Prints lines, and from time to time the run's progress."""

    every_s = 30.0  # between two states

    def start(self, state: DisplayState) -> None:
        """Start displaying a run."""
        self._shown = state

    def show(self, state: DisplayState) -> None:
        """Display the run's progress."""
        before, self._shown = self._shown, state
        rate = (state.samples - before.samples) / (state.seconds - before.seconds)
        self.say(
            f"{state.epoch_and_loss[0]}, step {state.done:,} of {state.total:,}: "
            f"{state.epoch_and_loss[1]}, {rate:,.0f} samples/s"
        )

    def stop(self, state: DisplayState) -> None:
        """Leave the terminal as it was; the run may continue elsewhere."""


@final
class Bar(_OnConsole):
    """Draws a bar, redrawn a few times a second from the training loop itself."""

    every_s = 0.25

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        are_seen = False  # else rich would print here what goes to a file, for example
        with contextlib.suppress(Exception):  # the program's replacement may do anything
            are_seen = sys.stderr.isatty()
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stderr=are_seen
        )

    def start(self, state: DisplayState) -> None:
        """Start displaying a run."""
        self._live.start()
        self.show(state)

    def show(self, state: DisplayState) -> None:
        """Display the run's progress in a bar that fits the terminal's current width."""
        line = state.line(max(0, min(_BAR_WIDTH, self._console.width - 70)))
        if self._console.options.ascii_only:
            line = line.replace("━", "#").replace("─", "-")
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def stop(self, state: DisplayState) -> None:
        """Leave the terminal as it was; the run may continue elsewhere."""
        self._live.stop()


Display: TypeAlias = Lines | Bar | Observed
"""Displays a run: it starts and stops, receives states, and prints lines that stay."""


@final
class Progress(Callback):
    """Displays the run and its messages, on one worker at a time. Always present.

    Args:
        make: returns the display, on the worker for which ``fit.is_first`` holds.
        clock: returns the time in seconds.
    """

    may_fail = True

    def __init__(
        self, make: Callable[[], Display] = display, clock: Clock = time.monotonic
    ) -> None:
        self._make, self._clock = make, clock
        self._fit: Fit | None = None
        self._display: Display | None = None
        self._is_broken = self._is_under_way = False
        self._done = self._total = 0
        self._count = Count(0.0, clock)

    def on_begin(self, fit: Fit) -> None:
        """Start the display at the step where the run begins."""
        self._stop()
        self._display = None
        self._fit, self._done, self._total = fit, fit.step, fit.end_step
        self._is_under_way = True
        self._show(lambda display: None)

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Count a step, unless it was counted before the run went back."""
        if step.number < self._done:
            return
        if step.number > self._done:
            self._drop()  # a replacement has not counted the steps before
        self._done = step.number

        def count(display: Display) -> None:
            state = self._count.step(step.epoch, step.means["loss"], step.num_samples)
            if state is not None:
                display.show(state)

        self._show(count)
        self._done += 1

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """Leave the terminal as it was."""
        self._stop()
        self._is_under_way = False

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """Leave the terminal as it was."""
        self._stop()
        self._is_under_way = False

    def say(self, fit: Fit, line: str) -> None:
        """Print one line that stays."""
        self._fit = fit
        self._show(lambda display: display.say(line))

    def _show(self, act: Callable[[Display], None]) -> None:
        """Act on the display if this worker displays the run; otherwise drop the display."""
        if self._fit is None or not self._fit.is_first:
            self._drop()
        elif not self._is_broken:
            try:
                act(self._begun())
            except Exception as error:
                self._give_up(error)

    def _begun(self) -> Display:
        if self._display is None:
            self._display = self._make()
            # Lines printed before or after the run need no progress display.
            if self._is_under_way:
                self._count = Count(self._display.every_s, self._clock)
                self._display.start(self._count.start(self._done, self._total))
        return self._display

    def _stop(self) -> None:
        if self._display is not None and self._is_under_way:
            try:
                self._display.stop(self._count.state)
            except Exception as error:
                self._give_up(error)

    def _drop(self) -> None:
        """Stop this display, so that another one can begin, here or on another worker."""
        self._stop()
        self._display = None

    def _give_up(self, error: Exception) -> None:
        broken, self._display, self._is_broken = self._display, None, True
        with contextlib.suppress(Exception):
            if broken is not None:
                broken.stop(self._count.state)
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        say(
            f"standard output cannot be written ({why}); training continues without progress "
            f"output."
        )
