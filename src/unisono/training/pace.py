"""Are several workers slower than one would be? Reported once, if a model is too small to gain.

Sharing a step costs a few synchronizations, whatever the model is. One worker would need the passes
and updates of all, one after another::

    W workers   pass │ waits, sums │ update │ callbacks            from one step to the next
    one         pass of rank 0 │ pass of rank 1 │ … │ updates │ callbacks
"""

from __future__ import annotations

from statistics import median
from typing import final

from unisono.runtime.notices import duration
from unisono.runtime.workers.team import Team

_FROM_STEP, _NUM_STEPS = 48, 16  # of a call; earlier steps rehearse and allocate
_SURELY = 1.15


@final
class Pace:
    """Compares some steps of one call of ``fit`` with what one worker would take.

    Args:
        begun_at: the number of the call's first step.
    """

    def __init__(self, team: Team, begun_at: int) -> None:
        self._team, self._first = team, begun_at + _FROM_STEP
        self._seen: list[tuple[float, float]] = []  # seconds of a step, and of one worker's

    def record_step(self, step: int) -> str | None:
        """Time a finished step; return a line for the user once enough steps are timed."""
        if not self._first <= step < self._first + _NUM_STEPS:
            return None
        team = self._team
        before, now = (team.times(team.world.rank, each) for each in (step - 1, step))
        of_all = [team.times(rank, step - 1) for rank in team.membership.ranks]
        if before is not None and now is not None and None not in of_all:
            step_s = now[0] - before[0]
            between_s = max(0.0, step_s - sum(before[1:]))  # callbacks, which one worker also has
            # Without the wait for other workers and the sum over them.
            alone_s = sum(sum(times[1:4]) + times[6] for times in of_all if times is not None)
            self._seen.append((step_s, between_s + alone_s))
        if step + 1 < self._first + _NUM_STEPS or len(self._seen) < _NUM_STEPS // 2:
            return None
        step_s, alone_s = (median(seconds) for seconds in zip(*self._seen, strict=True))
        if step_s < _SURELY * alone_s:
            return None
        return (
            f"{len(of_all)} workers are slower than one would be: a step takes {duration(step_s)}, "
            f"but all workers' passes and updates, with what lies between, {duration(alone_s)}; a "
            f"larger model or batch gains, and `unisono plan` measures from which batch on"
        )
