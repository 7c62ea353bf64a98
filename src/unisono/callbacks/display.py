"""What a run is shown on: a bar on a terminal, plain lines elsewhere, a notebook's cell."""

from __future__ import annotations

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
from unisono.callbacks.display_state import DisplayState
from unisono.notices import shown_lines
from unisono.workers.context import context
from unisono.workers.launcher_link import has_launcher
from unisono.workers.launcher_messages import ShowProgress


class Display(Protocol):
    """Shows a run."""

    @property
    def every_s(self) -> float:
        """How long to wait from one state that is shown to the next, in seconds."""

    def start(self, state: DisplayState) -> None:
        """Begin with a run."""

    def show(self, state: DisplayState) -> None:
        """Show how far the run is."""

    def say(self, line: str) -> None:
        """Show one line that stays."""

    def stop(self, state: DisplayState) -> None:
        """Leave the terminal as it was; the run has come to `state`, and may go on elsewhere."""


class _Output(Console):
    """Standard output. If its reader has gone, rich would end the program."""

    def on_broken_pipe(self) -> None:
        raise  # what rich has just caught


def display(console: Console | None = None) -> Display:
    """Choose what a run is shown on: a bar, or lines.

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


class Lines:
    """Prints lines, and now and then how far the run is. Final.

    Args:
        console: where to.
    """

    every_s = 30.0

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, state: DisplayState) -> None:
        """See :class:`Display`."""
        self._shown = state

    def show(self, state: DisplayState) -> None:
        """See :class:`Display`."""
        before, self._shown = self._shown, state
        rate = (state.samples - before.samples) / (state.seconds - before.seconds)
        self.say(
            f"{state.epoch_and_loss[0]}, step {state.done:,} of {state.total:,}: "
            f"{state.epoch_and_loss[1]}, {rate:,.0f} samples/s"
        )

    def say(self, line: str) -> None:
        """See :class:`Display`."""
        _print_line(self._console, line)

    def stop(self, state: DisplayState) -> None:
        """See :class:`Display`."""


class Bar:
    """Shows a bar, redrawn a few times a second from the training loop itself. Final.

    Args:
        console: a terminal.
    """

    every_s = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            *columns(console.width), console=console, auto_refresh=False, transient=True
        )
        # Before the first step nothing is known but how far the run is.
        self._task = self._progress.add_task("", epoch="", loss="loss -", rate="")

    def start(self, state: DisplayState) -> None:
        """See :class:`Display`."""
        self._progress.update(self._task, completed=state.done, total=state.total)
        self._progress.start()

    def show(self, state: DisplayState) -> None:
        """See :class:`Display`."""
        # The terminal may have another width than when the run began.
        self._progress.columns = columns(self._console.width)
        epoch, loss = state.epoch_and_loss
        self._progress.update(
            self._task,
            completed=state.done,
            epoch=epoch,
            loss=loss,
            rate=f"{state.samples / state.seconds:,.0f} samples/s",
            refresh=True,
        )

    def say(self, line: str) -> None:
        """See :class:`Display`."""
        _print_line(self._console, line)

    def stop(self, state: DisplayState) -> None:
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
