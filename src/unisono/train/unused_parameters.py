"""Which parameters get no gradient, so that they stay as they are? Told once, after some steps.

Most often a layer is made and then forgotten in `forward`, or its output is detached. A part of a
model that is used in some steps only, such as one of several heads, has its gradient in one of
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.notices import named
from unisono.state.contents import updated_parameters
from unisono.state.several_optimizers import members_of
from unisono.train.run_context import RunContext

STEPS = 8


class UnusedParameters:
    """Watches the first steps of a run's first loop. Final.

    Attributes:
        is_watching: whether there are steps to look at yet.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._seen: list[bool] = []
        self._steps_to_go = STEPS
        # Of several optimizers one may step now and then alone.
        self.is_watching = not run.has_told_unused and len(members_of(run.kept.optimizer)) == 1

    def look(self, present: Sequence[bool]) -> None:
        """Take into account which parameters had a gradient in a step; tell after the last one."""
        before = self._seen or [False] * len(present)
        self._seen = [a or b for a, b in zip(before, present, strict=True)]
        self._steps_to_go -= 1
        if self._steps_to_go:
            return
        run, self.is_watching = self._run, False
        run.has_told_unused = True
        unused = self._names()
        if unused and run.team.position == 0 and not run.joint_calls.is_behind:
            run.say(in_words(unused))

    def _names(self) -> list[str]:
        kept = self._run.kept
        updated = updated_parameters(kept.model, kept.optimizer)
        return [
            name
            for (name, parameter), is_seen in zip(updated.items(), self._seen, strict=True)
            if not is_seen and parameter.requires_grad
        ]


def in_words(names: Sequence[str]) -> str:
    """Name parameters that have had no gradient."""
    have, them = ("has", "it") if len(names) == 1 else ("have", "them")
    return (
        f"{named(names)} {have} had no gradient in {STEPS} steps, so the optimizer leaves {them} "
        f"unchanged: use {them} in `forward`, or leave {them} out of the optimizer (this is told "
        f"once)"
    )
