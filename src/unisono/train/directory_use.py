"""Whose is a run directory? Of the trainers of one program, that of one at a time.

A run may go on where an earlier one of the same program has stopped: a cell of a notebook is run
again. Two that take turns would each take the other's checkpoints for its own.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path


class DirectoryUse:
    """One run's turn in its directory. Final.

    Args:
        directory: the run directory, which need not be there.

    Attributes:
        has_begun: whether the run has begun there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begun = _begun_in(os.path.realpath(directory))
        self._num_seen = len(self._begun)
        self.has_begun = False

    def take(self) -> None:
        """Begin, or go on, in the directory.

        Raises:
            ValueError: another run has begun there since this one was made or began.
        """
        if len(self._begun) != self._num_seen:
            raise ValueError(
                f"`directory` must be one trainer's alone, but another one of this program has "
                f"begun in {self._directory} since this one was made: give each its own directory."
            )
        if not self.has_begun:
            self.has_begun = True
            self._begun.append(self)
            self._num_seen += 1


@functools.cache
def _begun_in(directory: str) -> list[DirectoryUse]:
    """Give the runs of this process that have begun in one directory, in their order."""
    return []
