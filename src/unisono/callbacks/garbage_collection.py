"""Collects garbage on all workers at the same step.

Python's cyclic collector runs whenever enough objects have been made: on each worker at another
moment, while the others wait for that worker at the next meeting.
"""

from __future__ import annotations

import gc

from unisono.callbacks.callback import Callback, DoneStep, Fit
from unisono.callbacks.summary import Summary
from unisono.whole import check_whole

_FROZEN_BY_PYTHON = 1000  # Python 3.12 begins with 375 objects


class GarbageCollection(Callback):
    """Collects garbage after every so many steps, on all workers at once, and never else. Final.

    Python collects by itself again when ``fit`` is over.

    Args:
        every: the steps from one collection to the next. Tensors in cycles stay until then.

    Raises:
        TypeError: `every` is not a whole number.
        ValueError: `every` is too small.
    """

    def __init__(self, every: int = 100) -> None:
        self._every = check_whole("every", every, at_least=1)
        self._is_to_be_enabled = self._is_to_be_unfrozen = False

    def on_begin(self, fit: Fit) -> None:
        """Collect once, and exclude what has survived from later collections."""
        self._put_back()
        self._is_to_be_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        if gc.get_freeze_count() < _FROZEN_BY_PYTHON:  # so the program has not
            self._is_to_be_unfrozen = True
            gc.freeze()

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Collect if it is time."""
        if (step.number + 1) % self._every == 0:
            gc.collect()

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """Let Python collect as before."""
        self._put_back()

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """Let Python collect as before."""
        self._put_back()

    def _put_back(self) -> None:
        if self._is_to_be_unfrozen:
            gc.unfreeze()
        if self._is_to_be_enabled:
            gc.enable()
        self._is_to_be_enabled = self._is_to_be_unfrozen = False
