"""Which loops over steps are under way here? Each must end before the one around it goes on.

::

    for a in first.steps(…):                    for a, b in zip(first.steps(…), second.steps(…)):
        for b in second.steps(…): …                 …
    one within the other: as it may be          step by step in turns: only without recovery

A replacement joins one loop, and a checkpoint is of one run. Of two that take turns step by step,
a lost worker could join neither, and a job that is started again would go on with each from a step
of its own, with other bits and no word. So where either could happen they are refused at once, not
when a worker is lost after a night.
"""

from __future__ import annotations

import threading

from unisono.per_process import per_process


class OpenLoop:
    """One loop, under way within a block, however that ends. Final.

    Args:
        recovers: whether lost workers are made up for.
        has_directory: whether its run has checkpoints.
    """

    def __init__(self, *, recovers: bool, has_directory: bool) -> None:
        self._loops = per_process(_Loops).under_way
        self._recovers, self._has_directory = recovers, has_directory

    def __enter__(self) -> OpenLoop:
        self._loops.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        # Of two that take turns the first one ends first.
        self._loops.remove(self)

    def check_is_inmost(self) -> None:
        """Refuse to go on, behind a step, while a loop that began later is under way.

        Raises:
            RuntimeError: lost workers are made up for, or one of these runs has a directory.
        """
        if self._loops[-1] is self:
            return
        inner = self._loops[self._loops.index(self) :]
        wanted = "a loop over steps must end before the one around it goes on"
        if any(loop._has_directory for loop in inner):
            raise RuntimeError(
                f"{wanted} where a run has a `directory`, as its checkpoints are of one run and "
                f"the two would go on from different steps, but two loops take turns step by step: "
                f"train both in one run, with `unisono.Run(models, optimizers)` and `step.update`, "
                f"or leave `directory` out of both runs, and save what they have led to yourself."
            )
        if self._recovers:
            raise RuntimeError(
                f"{wanted} where lost workers are replaced, as a replacement can join only one "
                f"of them, but two loops take turns step by step: start the job with "
                f"`--restarts 0` or `restarts=0`, which has the same bits, and in which a lost "
                f"worker ends the job; or train both in one run, with "
                f"`unisono.Run(models, optimizers)` and `step.update`."
            )


class _Loops(threading.local):
    """The loops of each thread, the one that began last at the end. Final."""

    def __init__(self) -> None:
        self.under_way: list[OpenLoop] = []
