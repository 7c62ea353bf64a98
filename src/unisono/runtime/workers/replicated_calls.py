"""What have the workers done together so far? A replacement catches up from this record.

Outside of loops, all workers make *replicated calls* with one outcome: agreeing, resuming from a
checkpoint, evaluating, a digest. Each call is counted, and the launcher keeps its outcome. A
replacement runs the same program from its start; for calls that the others have finished it gets
the outcome instead of making the call. Once it has caught up it joins the membership::

    worker 0   agree ─ loop ═══ step 812 ════════ step 813 ═══════
    worker 1   agree ─ loop ═══ step 8✕
    replaced            agree ─ loop (caught up: waits for the next step) ═ step 813 ═══

Calls inside of a loop are not counted: a replacement joins a loop between two of its steps.

On several hosts no worker continues without a lost one: all run the program again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, final

from unisono.errors import PeerLostError, WaitTimeoutError
from unisono.runtime.described import described, like
from unisono.runtime.workers.interrupts import interrupts
from unisono.runtime.workers.launcher_messages import (
    LOOP,
    Live,
    LoopBegan,
    NoRecovery,
    Passed,
    ReplicatedResult,
)
from unisono.runtime.workers.team import Team

_INNER_LOOPS_AT_MOST = 1 << 32
_RETURNED, _RAISED = b"=", b"!"  # what an outcome begins with
_OF_PEERS = (PeerLostError, WaitTimeoutError)  # not all workers raise these


def _outcome(kept: bytes) -> bytes:
    """Return what a call returned, or raise an exception like the one that it raised."""
    if kept.startswith(_RAISED):
        raise like(json.loads(kept[1:]))
    return kept[1:]


@final
class ReplicatedCalls:
    """One worker's position in the sequence of replicated calls."""

    def __init__(self, team: Team) -> None:
        self.team = team
        # whether this worker is still catching up; output that is printed once was printed already
        self.is_behind = team.is_replacement
        self.index = 0  # of this replicated call
        self._supervisor = team.supervisor
        self._num_loops = 0
        self._num_inner_loops = 0

    def new_key(self) -> int:
        """Return a memory key for the loop that has just been entered: the same on every worker."""
        if self._num_loops > 1:  # a nested loop cannot be joined, so a count is enough
            self._num_inner_loops += 1
        return self.index * _INNER_LOOPS_AT_MOST + self._num_inner_loops

    @property
    def is_recorded(self) -> bool:
        """Whether the launcher keeps the outcome of this replicated call for replacements."""
        return not self._num_loops

    @property
    def is_loop_kept(self) -> bool:
        """Whether the launcher keeps the outcome of the loop that has just been entered."""
        return self._supervisor.can_replace and self._num_loops == 1

    def together(self, name: str, act: Callable[[], bytes]) -> bytes:
        """Return the outcome of `act`, which is the same on every worker. Collective.

        Returns the kept outcome where the others have already made the call, or raises an exception
        like theirs. Raises if a replacement reaches a call with another `name`.
        """
        if self._num_loops:
            return act()
        interrupts().honour(self.team)
        if self.is_behind:
            entry = self._entry(name)
            if isinstance(entry, Passed):
                self.index += 1
                return _outcome(entry.payload)
        try:
            payload = act()
        except Exception as error:
            if isinstance(error, _OF_PEERS):
                self._supervisor.notify(NoRecovery("the workers did not end a call together"))
            self._note_result(name, _RAISED + json.dumps(described(error)).encode())
            raise
        except BaseException:
            self._supervisor.notify(NoRecovery("the program was interrupted outside of a loop"))
            raise
        self._note_result(name, _RETURNED + payload)
        return payload

    def broadcast_from_leader(self, speak: Callable[[], bytes], purpose: str) -> bytes:
        """Call :meth:`Team.broadcast_from_leader` in a replicated call. Collective."""
        return self.together(purpose, lambda: self.team.broadcast_from_leader(speak, purpose))

    def enter_loop(self) -> Passed | Live | None:
        """Enter a loop. Return its outcome or its facts to a replacement, else None. Collective."""
        entry = None
        if self._num_loops:
            self._supervisor.notify(NoRecovery("one loop over steps runs inside of another"))
        elif self.is_behind:
            entry = self._entry(LOOP)
        if isinstance(entry, Passed):
            self.index += 1
        else:
            self._num_loops += 1
        return entry

    def note_loop(self, facts: dict[str, Any]) -> None:
        """Report to the launcher that the loop can be joined. Every rank calls it, in the loop."""
        if self._num_loops == 1:
            self._supervisor.notify(LoopBegan(self.index, facts))

    def leave_loop(self, payload: bytes | None) -> None:
        """Leave a loop; `payload` says where it ended; None: replacements cannot continue there."""
        self._num_loops -= 1
        if self._num_loops:
            return
        if payload is None:
            self._supervisor.notify(NoRecovery("a loop was left before its end"))
        self._note_result(LOOP, payload or b"")

    def _note_result(self, name: str, payload: bytes) -> None:
        self._supervisor.notify(ReplicatedResult(self.index, name, payload))
        self.index += 1

    def _entry(self, name: str) -> Passed | Live:
        entry = self._supervisor.catch_up(self.index, name)
        if isinstance(entry, Live):
            self.is_behind = False
            self.team.join(entry.membership)
        return entry
