"""What have the workers done together so far? So that a replacement can catch up.

Outside of loops, all workers make *replicated calls* with one outcome: agreeing, resuming from a
checkpoint, evaluating, a digest. Each is counted, and the launcher keeps its outcome. A replacement
runs the same program from its start; where the others have already been, it gets the outcome
instead of making the call. Once it has caught up it belongs to the membership::

    worker 0   agree ─ loop ═══ step 812 ════════ step 813 ═══════
    worker 1   agree ─ loop ═══ step 8✕
    replaced            agree ─ loop (caught up: waits for the next step) ═ step 813 ═══

What happens inside of a loop is not counted: a loop is joined between two of its steps.

On several hosts no worker continues without a lost one: once it is replaced, all begin their
present replicated call again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from unisono.runtime.workers.interrupts import interrupts
from unisono.runtime.workers.launcher_messages import (
    LOOP,
    Live,
    LoopBegan,
    NoRecovery,
    Passed,
    ReplicatedResult,
)
from unisono.runtime.workers.team import StepBrokenError, Team

_INNER_LOOPS_AT_MOST = 1 << 32


@final
class ReplicatedCalls:
    """One worker's way through the replicated calls."""

    def __init__(self, team: Team) -> None:
        self.team = team
        # whether this worker still catches up; what is printed once has been printed already
        self.is_behind = team.is_replacement
        # whether it is behind a step that all hosts compute again; replacements are not there
        self.is_undone = False
        self.index = 0  # of this replicated call
        self._supervisor = team.supervisor
        self._num_loops = 0
        self._num_inner_loops = 0

    def new_key(self) -> int:
        """Name a memory for the loop that has just been entered: the same on every worker."""
        if self._num_loops > 1:  # nobody joins a loop inside of another, so a count will do
            self._num_inner_loops += 1
        return self.index * _INNER_LOOPS_AT_MOST + self._num_inner_loops

    @property
    def is_told(self) -> bool:
        """Whether the launcher keeps the outcome of this replicated call for replacements."""
        return not self._num_loops

    @property
    def is_loop_kept(self) -> bool:
        """Whether the launcher keeps what the loop just entered will end with."""
        return self._supervisor.can_replace and self._num_loops == 1

    def together(self, name: str, act: Callable[[], bytes]) -> bytes:
        """Have `act` make a call whose outcome is the same on every worker. Collective.

        It is not called where they have already been. A replacement that comes to another `name`
        is refused.
        """
        if self._num_loops:
            if self.is_undone:
                raise RuntimeError(
                    f"`{name}` must follow a step that is done, but the one before was undone, as "
                    f"a worker was lost: write `if not step.is_done: continue` behind the step."
                )
            return act()
        interrupts().honour(self.team)
        if self.is_behind:
            entry = self._entry(name)
            if isinstance(entry, Passed):
                self.index += 1
                return entry.payload
        payload: bytes | None = None
        while payload is None:
            try:
                payload = act()
            except StepBrokenError:
                if len(self.team.hosts) == 1:
                    raise
                payload = self._supervisor.outcome(self.index, name)
            except Exception:
                self._supervisor.tell(NoRecovery("an exception was raised outside of a loop"))
                raise
        self._note_result(name, payload)
        return payload

    def hear_leader(self, speak: Callable[[], bytes], purpose: str) -> bytes:
        """Do :meth:`Team.hear_leader` so that replacements hear it, too. Collective."""
        return self.together(purpose, lambda: self.team.hear_leader(speak, purpose))

    def enter_loop(self) -> Passed | Live | None:
        """Come to a loop; gives a replacement its outcome or its facts. Collective."""
        entry = None
        if self._num_loops:
            self._supervisor.tell(NoRecovery("one loop over steps runs inside of another"))
        elif self.is_behind:
            entry = self._entry(LOOP)
        if isinstance(entry, Passed):
            self.index += 1
        else:
            self._num_loops += 1
        return entry

    def enter_again(self) -> Live:
        """Begin the loop that was just entered again, as a worker was lost; gives its facts."""
        return Live(self.team.membership, self._supervisor.agreed_loop, is_alone=True)

    @property
    def end_of_loop(self) -> bytes | None:
        """Where the loop under way has ended, if it has on other hosts."""
        return self._supervisor.outcome(self.index, LOOP)

    def note_loop(self, facts: dict[str, Any]) -> None:
        """Tell the launcher that the loop can be joined now. Every rank calls it, inside of it."""
        if self._num_loops == 1:
            self._supervisor.tell(LoopBegan(self.index, facts))

    def leave_loop(self, payload: bytes | None) -> None:
        """End a loop; `payload` says where, None that a replacement cannot go on from there."""
        self._num_loops -= 1
        self.is_undone = False
        if self._num_loops:
            return
        if payload is None:
            self._supervisor.tell(NoRecovery("a loop was left before its end"))
        self._note_result(LOOP, payload or b"")

    def _note_result(self, name: str, payload: bytes) -> None:
        self._supervisor.tell(ReplicatedResult(self.index, name, payload))
        self.index += 1

    def _entry(self, name: str) -> Passed | Live:
        entry = self._supervisor.catch_up(self.index, name)
        if isinstance(entry, Live):
            self.is_behind = False
            self.team.join(entry.membership)
        return entry
