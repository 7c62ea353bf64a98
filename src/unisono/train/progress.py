"""What a person sees of a run: a bar on a terminal, plain lines elsewhere; from rank 0 alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

_REDRAW_EVERY_S = 0.25


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


def display(rank: int) -> Display:
    """Choose the display for a worker: silence, a bar, or lines."""
    if rank != 0:
        return Silence()
    console = Console()
    return Bar(console) if console.is_terminal else Lines(console)


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
    """Shows only the lines that stay. Final."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, done: int, total: int) -> None:
        """See :class:`Display`."""

    def step(self, epoch: int, loss: float, num_samples: int) -> None:
        """See :class:`Display`."""

    def say(self, line: str) -> None:
        """See :class:`Display`."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """See :class:`Display`."""


class Bar:
    """Shows a bar, redrawn a few times a second from the training loop itself. Final."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[rate]:,.0f} samples/s"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("", start=True, epoch=0, loss=float("nan"), rate=0.0)
        self._steps = 0
        self._samples = 0
        self._drawn_at = 0.0
        self._started_at = 0.0

    def start(self, done: int, total: int) -> None:
        """See :class:`Display`."""
        self._progress.update(self._task, completed=done, total=total)
        self._steps, self._samples = done, 0
        self._started_at = self._drawn_at = time.perf_counter()
        self._progress.start()

    def step(self, epoch: int, loss: float, num_samples: int) -> None:
        """See :class:`Display`."""
        self._steps += 1
        self._samples += num_samples
        now = time.perf_counter()
        if now - self._drawn_at >= _REDRAW_EVERY_S:
            self._drawn_at = now
            rate = self._samples / (now - self._started_at)
            self._progress.update(
                self._task, completed=self._steps, epoch=epoch, loss=loss, rate=rate, refresh=True
            )

    def say(self, line: str) -> None:
        """See :class:`Display`."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """See :class:`Display`."""
        self._progress.stop()


@dataclass(frozen=True, slots=True)
class Summary:
    """What a call of ``fit`` did.

    Attributes:
        steps: steps of this call.
        samples: samples of this call.
        seconds: wall time of this call, in seconds, validation left out.
        shards: S.
        workers: W.
        digest: of the state at the end.
        means: of the last step.
        validation: the last validation, if there was one.
    """

    steps: int
    samples: int
    seconds: float
    shards: int
    workers: int
    digest: str
    means: Mapping[str, float]
    validation: Mapping[str, float] | None

    @property
    def samples_per_second(self) -> float:
        """The rate of all workers together."""
        return self.samples / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        shards = "1 shard" if self.shards == 1 else f"{self.shards} shards"
        return (
            f"{self.steps:,} steps, {self.samples:,} samples in {self.seconds:.1f} s: "
            f"{self.samples_per_second:,.0f} samples/s, {shards} on {workers}, "
            f"digest {self.digest[:16]}"
        )


def told(means: Mapping[str, float]) -> str:
    """Write scalars for a person, ``loss 0.1234, accuracy 0.9876``."""
    return ", ".join(f"{name} {value:.4f}" for name, value in means.items())
