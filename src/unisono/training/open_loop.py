"""Each loop over steps must end before the one around it continues.

A replacement joins one loop, and a checkpoint belongs to one run. Interleaved loops would have
different bits.
"""

from __future__ import annotations

import threading
from typing import final

from unisono.runtime.world import per_process


@final
class OpenLoop:
    """One running loop, for the time of a `with` block."""

    def __init__(self, *, recovers: bool, has_directory: bool) -> None:
        self._loops = per_process(_Loops).under_way
        self._recovers, self._has_directory = recovers, has_directory

    def __enter__(self) -> OpenLoop:
        self._loops.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        # Of two interleaved loops, the first one ends first.
        self._loops.remove(self)

    def check_is_inmost(self) -> None:
        """Raise RuntimeError if a loop that began later is still running."""
        if self._loops[-1] is self:
            return
        inner = self._loops[self._loops.index(self) :]
        if self._recovers or any(loop._has_directory for loop in inner):
            raise RuntimeError(
                "a loop over steps must end before the one around it continues if lost workers "
                "are replaced or a run has a `directory`, as a replacement joins one loop and a "
                "checkpoint is of one run, but two loops alternate step by step: train both in "
                "one run, with `unisono.Run(models, optimizers)` and `step.update`; or start the "
                "job with `--restarts 0` or `restarts=0`, and leave `directory` out of both runs."
            )


@final
class _Loops(threading.local):
    """The running loops of each thread, the innermost last."""

    def __init__(self) -> None:
        self.under_way: list[OpenLoop] = []
