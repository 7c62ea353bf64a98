"""Keeps track of whether replacements can still be given what was predicted.

A replacement runs the program again, and where the others have predicted outside of loops it takes
over the rows: from the file, or from the launcher, which keeps them as long as the job lasts; so
there must be few. Once some rows can be had from nobody, a replacement cannot pass that place: it
says so and ends, and the others continue without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from unisono.workers.joint_calls import JointCalls

AT_ONCE_BYTES = 4 << 20
IN_ALL_BYTES = 64 << 20


class Ledger:
    """What replacements in this job are to take over, as every worker counts it. Final.

    Attributes:
        is_closed: a replacement cannot take over all of it any more.
    """

    @staticmethod
    @functools.cache
    def of(joint_calls: JointCalls) -> Ledger:
        """Give the ledger of a job, always the same."""
        return Ledger()

    def __init__(self) -> None:
        self.is_closed = False
        self._num_bytes = 0
        self._paths: set[Path] = set()

    def keep_rows(self, num_bytes: int, say: Callable[[str], None]) -> bool:
        """Count rows that have no file; return whether the launcher is to keep them."""
        if num_bytes > AT_ONCE_BYTES or self._num_bytes + num_bytes > IN_ALL_BYTES:
            self._close(
                f"{num_bytes:,} bytes of predictions are more than is kept for replacements "
                f"({AT_ONCE_BYTES >> 20} MiB at once, {IN_ALL_BYTES >> 20} MiB in all; with "
                f"`path=` they are in a file)",
                say,
            )
        if self.is_closed:
            return False
        self._num_bytes += num_bytes
        return True

    def note_file(self, path: Path, say: Callable[[str], None], *, is_kept: bool) -> None:
        """Note that there are predictions at `path` now; `is_kept`: replacements need them."""
        if path in self._paths:
            self._close(
                f"the predictions in {path} took the place of earlier ones, which a replacement "
                f"needs (with a `path=` of its own for each they stay)",
                say,
            )
        if is_kept:
            self._paths.add(path)

    def _close(self, why: str, say: Callable[[str], None]) -> None:
        if not self.is_closed:
            self.is_closed = True
            say(
                f"{why}: a worker that is lost from here on is not replaced, and the others (if "
                f"there are any) go on without it."
            )
