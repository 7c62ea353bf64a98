"""What a person sees of a run: a bar on a terminal, plain lines elsewhere; from one worker.

A run that can no longer be shown (a full disk, a pipe that nobody reads, an output that the program
has closed or replaced by another) goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from unisono.callbacks.cell import Cell, Observed, in_notebook, launcher_draws
from unisono.callbacks.display_state import Clock, Count
from unisono.notices import say, shown_lines
from unisono.workers.context import context
from unisono.workers.launcher_link import has_launcher
from unisono.workers.launcher_messages import ShowProgress

_REDRAW_EVERY_S = 0.25
_LINE_EVERY_S = 30.0


class Display(Protocol):
    """Shows a run."""

    def start(self, done: int, total: int) -> None:
        """Begin at step `done` of `total`."""

    def step(self, epoch: int, loss: float, num_samples: int) -> None:
        """Count one step."""

    def say(self, line: str) -> None:
        """Show one line that stays."""

    def stop(self) -> None:
        """Leave the terminal as it was."""


class _Output(Console):
    """Standard output. Where nobody reads it any more, rich would end the program."""

    def on_broken_pipe(self) -> None:
        raise  # what rich has just caught


def display(console: Console | None = None) -> Display:
    """Choose the display for whoever shows a run: a bar, or lines.

    Args:
        console: where to; the notebook's cell, or standard output, by default.
    """
    if console is None and (in_cell := _in_cell()) is not None:
        return in_cell
    console = _Output() if console is None else console
    can_redraw = console.is_terminal and not console.is_dumb_terminal
    return Bar(console) if can_redraw else Lines(console)


def _in_cell() -> Display | None:
    """Choose the display of a notebook: of this process, or of the one that launched it."""
    if launcher_draws() and has_launcher():
        supervisor = context().supervisor
        return Observed(lambda state: supervisor.tell(ShowProgress(asdict(state))))
    return Observed(Cell().draw) if in_notebook() else None


class Relay:
    """Lets one worker at a time show the run: whoever is to do it now. Final.

    Args:
        is_mine: whether it is this worker.
        make: makes the display to show it on.
    """

    def __init__(self, is_mine: Callable[[], bool], make: Callable[[], Display]) -> None:
        self._is_mine = is_mine
        self._make = make
        self._display: Display | None = None
        self._is_under_way = False
        self._done = self._total = 0

    def start(self, done: int, total: int) -> None:
        """See :class:`Display`."""
        self.stop()
        self._display = None
        self._done, self._total = done, total
        self._is_under_way = True
        self._show(lambda display: None)

    def step(self, epoch: int, loss: float, num_samples: int) -> None:
        """See :class:`Display`."""
        self._show(lambda display: display.step(epoch, loss, num_samples))
        self._done += 1

    def at(self, done: int) -> None:
        """Take notice of how far the run is: a replacement does not see its beginning."""
        if done != self._done:
            self._drop()
        self._done = done

    def say(self, line: str) -> None:
        """See :class:`Display`."""
        self._show(lambda display: display.say(line))

    def stop(self) -> None:
        """See :class:`Display`."""
        self._stop()
        self._is_under_way = False

    def _show(self, act: Callable[[Display], None]) -> None:
        try:
            act(self._now())
        except Exception as error:
            self._fall_silent(error)

    def _stop(self) -> None:
        if self._display is not None and self._is_under_way:
            try:
                self._display.stop()
            except Exception as error:
                self._fall_silent(error)

    def _fall_silent(self, error: Exception) -> None:
        broken, self._display, self._make = self._display, Silence(), Silence
        with contextlib.suppress(Exception):
            if broken is not None:
                broken.stop()
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        say(
            f"the run is not shown any more, since standard output takes nothing "
            f"({why}); it goes on."
        )

    def _drop(self) -> None:
        """Let another display begin, here or elsewhere."""
        self._stop()
        self._display = None

    def _now(self) -> Display:
        if not self._is_mine():
            self._drop()
            return Silence()
        if self._display is None:
            self._display = self._make()
            # What is said before the run begins, or after it, is a line and no more.
            if self._is_under_way:
                self._display.start(self._done, self._total)
        return self._display


class Silence:
    """Shows nothing. Final."""

    def start(self, done: int, total: int) -> None:
        """See :class:`Display`."""

    def step(self, epoch: int, loss: float, num_samples: int) -> None:
        """See :class:`Display`."""

    def say(self, line: str) -> None:
        """See :class:`Display`."""

    def stop(self) -> None:
        """See :class:`Display`."""


class Lines:
    """Shows lines that stay: those it is told to, and now and then how far the run is. Final.

    Args:
        console: where to.
        clock: gives the time in seconds.
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._count = Count(_LINE_EVERY_S, clock)
        self._told = self._count.sight

    def start(self, done: int, total: int) -> None:
        """See :class:`Display`."""
        self._told = self._count.start(done, total)

    def step(self, epoch: int, loss: float, num_samples: int) -> None:
        """See :class:`Display`."""
        sight = self._count.step(epoch, loss, num_samples)
        if sight is None:
            return
        samples, seconds = sight.samples - self._told.samples, sight.seconds - self._told.seconds
        self._told = sight
        self.say(
            f"epoch {epoch + 1}, step {sight.done:,} of {sight.total:,}: "
            f"loss {loss:.4f}, {samples / seconds:,.0f} samples/s"
        )

    def say(self, line: str) -> None:
        """See :class:`Display`."""
        _print_line(self._console, line)

    def stop(self) -> None:
        """See :class:`Display`."""


class Bar:
    """Shows a bar, redrawn a few times a second from the training loop itself. Final.

    Args:
        console: a terminal.
        clock: gives the time in seconds.
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._count = Count(_REDRAW_EVERY_S, clock)
        self._progress = Progress(
            *columns(console.width), console=console, auto_refresh=False, transient=True
        )
        # Before the first step nothing is known but how far the run is.
        self._task = self._progress.add_task("", epoch="", loss="loss -", rate="")

    def start(self, done: int, total: int) -> None:
        """See :class:`Display`."""
        self._count.start(done, total)
        self._progress.update(self._task, completed=done, total=total)
        self._progress.start()

    def step(self, epoch: int, loss: float, num_samples: int) -> None:
        """See :class:`Display`."""
        sight = self._count.step(epoch, loss, num_samples)
        if sight is None:
            return
        # The terminal may have another width than when the run began.
        self._progress.columns = columns(self._console.width)
        self._progress.update(
            self._task,
            completed=sight.done,
            epoch=f"epoch {epoch + 1}",
            loss=f"loss {loss:.4f}",
            rate=f"{sight.samples / sight.seconds:,.0f} samples/s",
            refresh=True,
        )

    def say(self, line: str) -> None:
        """See :class:`Display`."""
        _print_line(self._console, line)

    def stop(self) -> None:
        """See :class:`Display`."""
        self._progress.stop()


def columns(width: int) -> tuple[ProgressColumn, ...]:
    """Choose what is shown on a terminal that is `width` wide, so that all of it can be read.

    The bar takes the room that the others leave.
    """
    epoch, loss, rate = (
        TextColumn(f"{{task.fields[{name}]}}") for name in ("epoch", "loss", "rate")
    )
    bar, count = BarColumn(bar_width=40 if width >= 120 else None), MofNCompleteColumn()
    if width < 30:
        return count, loss
    if width < 60:
        return bar, count, loss
    if width < 80:
        return epoch, bar, count, loss, TimeRemainingColumn()
    return epoch, bar, count, loss, rate, TimeRemainingColumn()


def _print_line(console: Console, line: str) -> None:
    # Not every output has letters such as → and ×.
    encoding = getattr(console.file, "encoding", None) or "utf-8"
    fitting = shown_lines(line).encode(encoding, "replace").decode(encoding)
    console.print(fitting, highlight=False, markup=False, soft_wrap=True)
