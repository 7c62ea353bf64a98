"""Whose is a run directory? Of the trainers of one program, that of one at a time.

A run may go on where an earlier one of the same program has stopped: a cell of a notebook is run
again. Two that take turns would each take the other's checkpoints for its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from unisono.per_process import per_process


class _Runs:
    """How many runs of this process have begun in one directory. Final."""

    def __init__(self, directory: str) -> None:
        self.num_begun = 0


class DirectoryUse:
    """One run's turn in its directory. Final.

    Args:
        directory: the run directory, which need not be there.

    Attributes:
        has_begun: whether the run has begun there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs = per_process(_Runs, os.path.realpath(directory))
        self._seen = self._runs.num_begun
        self.has_begun = False

    def take(self) -> None:
        """Begin, or go on, in the directory.

        Raises:
            ValueError: another run has begun there since this one was made or began.
        """
        if self._runs.num_begun != self._seen:
            raise ValueError(
                f"`directory` must be one trainer's alone, but another one of this program has "
                f"begun in {self._directory} since this one was made: give each its own directory."
            )
        if not self.has_begun:
            self.has_begun = True
            self._runs.num_begun += 1
            self._seen = self._runs.num_begun
