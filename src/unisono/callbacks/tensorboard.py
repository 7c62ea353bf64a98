"""Writes curves for TensorBoard, each step once."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unisono.callbacks.callback import Callback, DoneStep, Fit
from unisono.callbacks.place import path_of, say_alone, trouble_at
from unisono.callbacks.scalars import check_installed, of_step, of_validation
from unisono.callbacks.summary import Summary
from unisono.notices import shown
from unisono.plainfile import check_own_folder
from unisono.whole import check_whole

NAME = "tensorboard"
_FLUSH_EVERY_S, _LOOK_EVERY_S = 5, 1.0
_KNOWN = 3


class TensorBoard(Callback):
    """Writes scalars that TensorBoard shows; needs ``pip install 'unisono[tensorboard]'``. Final.

    ``train/loss`` and the other means, ``learning_rate``, ``gradient_norm`` of steps, counted from
    0; ``validation/loss`` and so on at the step that was done last. If the run goes back or is
    resumed, TensorBoard forgets the steps that come again. If the worker that writes is lost,
    another continues, and repeats what may not have reached the disk. A full disk ends no run: it
    is reported, and curves end there until ``fit`` is called again.

    Writing a step costs 0.2 to 0.6 ms on one worker; if steps take a few milliseconds, pass
    ``every=10``.

    Args:
        path: the folder; None: ``tensorboard`` in the run directory.
        every: of how many steps one is written.

    Attributes:
        writer: torch's ``SummaryWriter`` on the worker that writes now, for what else a callback
            wants to write in ``on_step_end`` (figures, histograms); None on all others.

    Raises:
        TypeError: `every` is not a whole number.
        ValueError: `every` is too small.
        ModuleNotFoundError: TensorBoard is not installed.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, every: int = 1) -> None:
        check_installed("tensorboard", "TensorBoard", "tensorboard")
        self._given = None if path is None else Path(path)
        self._path = Path()  # of the call of `fit` under way
        self._every = check_whole("every", every, at_least=1)
        self.writer: Any = None
        # The newest steps: what the worker that writes may have been lost over.
        self._known: deque[Scalars] = deque(maxlen=_KNOWN)
        self._has_begun = self._has_complained = False
        self._file: Path | None = None
        self._looked_at_s = 0.0

    def writes_to(self, directory: Path | None) -> Path | None:
        """See :class:`Callback`."""
        return self._given or (directory and directory / NAME)

    def on_begin(self, fit: Fit) -> None:
        """Continue where the run continues."""
        self._path = path_of(self, fit, "the curves go", 'TensorBoard("runs/mine")')
        if self._given is None and not fit.has_joined:
            check_own_folder(self._path)
        self._known.clear()
        self._has_begun, self._has_complained = True, False
        self._look_who_writes(fit)

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Write what a step has to say."""
        self._look_who_writes(fit)
        if step.number % self._every:
            return
        self._add(fit, Scalars(step.number, time.time(), of_step(fit, step)))

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Write what a validation found."""
        if self._has_begun:
            self._look_who_writes(fit)
            self._add(fit, Scalars(fit.step - 1, time.time(), of_validation(means)))

    def on_went_back(self, fit: Fit, from_step: int) -> None:
        """Have TensorBoard forget the steps that come again."""
        self._known = deque((one for one in self._known if one.step < fit.step), maxlen=_KNOWN)
        self._close()
        self._look_who_writes(fit)

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """Close the file."""
        self._has_begun = False
        self._close()

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """Close the file."""
        self._has_begun = False
        self._close()

    def _look_who_writes(self, fit: Fit) -> None:
        """Begin to write, or leave it to another."""
        if not fit.is_leader:
            self._close()
        elif self.writer is None and not self._has_complained:
            # Else each step would begin another file, and wait for a name of its own.
            first = min((one.step for one in self._known), default=fit.step)
            try:
                if self._given is None:
                    check_own_folder(self._path)
                self.writer = _open(self._path, first)
                self._file = max(_files(self._path), default=None)
                for one in self._known:
                    one.write(self.writer)
            except OSError as error:
                self._complain(fit, error)
            except UnicodeError:
                self._complain(fit, OSError("TensorBoard takes only paths in UTF-8"))

    def _add(self, fit: Fit, added: Scalars) -> None:
        if self._known and self._known[-1].step == added.step:
            # All of a step together: what is repeated replaces all that was said of it.
            values = {**self._known.pop().values, **added.values}
            self._known.append(added._replace(values=values))
        else:
            self._known.append(added)
        if self._is_lost():
            self._begin_anew(fit)
        elif self.writer is not None:
            try:
                added.write(self.writer)
                # To the kernel, which keeps it if this worker is killed.
                self.writer.flush()
            except OSError as error:
                self._complain(fit, error)

    def _is_lost(self) -> bool:
        """Tell, once a second, whether the file that is written has gone."""
        now_s = time.monotonic()
        if self.writer is None or now_s - self._looked_at_s < _LOOK_EVERY_S:
            return False
        self._looked_at_s = now_s
        return self._file is not None and not os.path.lexists(self._file)

    def _begin_anew(self, fit: Fit) -> None:
        self._close()
        if trouble := trouble_at(fit, self._path):
            self._complain(fit, OSError(trouble))
            return
        say_alone(
            fit,
            f"the file of curves in {shown(self._path, 1000)} was removed while it was written: "
            f"what follows is in a new one.",
        )
        self._look_who_writes(fit)

    def _complain(self, fit: Fit, error: OSError) -> None:
        self._close()
        self._has_complained = True
        say_alone(
            fit,
            f"{shown(self._path, 1000)} must be writable, but is not "
            f"({error.strerror or error}): curves are missing there; training goes on.",
        )

    def _close(self) -> None:
        writer, self.writer = self.writer, None
        if writer is not None:
            # Whatever was not written has been told.
            with contextlib.suppress(OSError):
                writer.close()


class Scalars(NamedTuple):
    """Numbers of one step, by tag."""

    step: int
    time_unix_s: float
    values: dict[str, float]

    def write(self, writer: Any) -> None:
        """Give them to a ``SummaryWriter``."""
        for tag, value in self.values.items():
            writer.add_scalar(tag, value, self.step, self.time_unix_s)


def _open(path: Path, first: int) -> Any:
    """Begin a file that replaces what others in the folder say of step `first` and later."""
    # Slow to load, and of use to one worker alone.
    from torch.utils.tensorboard import SummaryWriter

    _wait_for_a_later_name(path)
    return SummaryWriter(
        str(path),
        purge_step=first if _files(path) else None,
        flush_secs=_FLUSH_EVERY_S,
        # A link of that name would be followed: nobody can know the name beforehand.
        filename_suffix=f".{secrets.token_hex(8)}",
    )


def _wait_for_a_later_name(path: Path) -> None:
    """Wait for the next second if another file was begun in this one: names give the order."""
    now_s = int(time.time())
    if any(f".{now_s:010d}." in file.name for file in _files(path)):
        time.sleep(max(0.0, now_s + 1 - time.time()))


def _files(path: Path) -> list[Path]:
    return list(path.glob("events.out.tfevents.*"))
