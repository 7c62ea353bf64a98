"""The callback that shows a run: a bar on a terminal, lines elsewhere, one line in a notebook.

A run that can no longer be shown (a full disk, a pipe that nobody reads, an output that the program
has closed or replaced by another) goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from unisono.callbacks.callback import Callback, DoneStep, Fit
from unisono.callbacks.display import Display, display
from unisono.callbacks.display_state import Clock, Count
from unisono.callbacks.summary import Summary
from unisono.notices import say


class Progress(Callback):
    """Shows the run and what is said about it, on one worker at a time. Always there. Final.

    Args:
        make: makes what it is shown on, on the worker for which ``fit.is_first`` holds.
        clock: gives the time in seconds.
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
        """Show where the run begins."""
        self._stop()
        self._display = None
        self._fit, self._done, self._total = fit, fit.step, fit.end_step
        self._is_under_way = True
        self._show(lambda display: None)

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Count a step, unless it has come before the run went back."""
        if step.number < self._done:
            return
        if step.number > self._done:
            self._drop()  # a replacement has not seen the steps before
        self._done = step.number
        self._show(lambda display: self._count_step(display, step))
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
        """Show one line that stays."""
        self._fit = fit
        self._show(lambda display: display.say(line))

    def _show(self, act: Callable[[Display], None]) -> None:
        """Do something with the display, if this worker is the one that shows the run."""
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
            # What is said before the run begins, or after it, is a line and no more.
            if self._is_under_way:
                self._count = Count(self._display.every_s, self._clock)
                self._display.start(self._count.start(self._done, self._total))
        return self._display

    def _count_step(self, display: Display, step: DoneStep) -> None:
        state = self._count.step(step.epoch, step.means["loss"], step.num_samples)
        if state is not None:
            display.show(state)

    def _stop(self) -> None:
        if self._display is not None and self._is_under_way:
            try:
                self._display.stop(self._count.state)
            except Exception as error:
                self._give_up(error)

    def _drop(self) -> None:
        """Let another display begin, here or on another worker."""
        self._stop()
        self._display = None

    def _give_up(self, error: Exception) -> None:
        broken, self._display, self._is_broken = self._display, None, True
        with contextlib.suppress(Exception):
            if broken is not None:
                broken.stop(self._count.state)
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        say(
            f"the run is not shown any more, since standard output takes nothing "
            f"({why}); it goes on."
        )
