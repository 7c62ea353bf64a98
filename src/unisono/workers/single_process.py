"""The host of a process that nobody launched: there is nobody to share with or to wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.workers.membership import Membership
from unisono.workers.memory import Memory
from unisono.workers.supervisor import Live, Passed


class SingleProcess:
    """A :class:`unisono.workers.supervisor.Supervisor` for a team of one. Final."""

    can_replace = False

    def note_ready(self) -> None:
        """Nobody will replace this process."""

    def memory(self, key: int, num_bytes: int) -> Memory:
        """Take memory that this process shares with nobody."""
        return Memory.private(num_bytes)

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """Go on at once."""
        return Membership((0,), leader=0)

    def entry(self, index: int, name: str) -> Passed | Live:
        """Nobody replaces a process that nobody launched."""
        raise AssertionError("a team of one has no replacements")

    def note_result(self, index: int, name: str, payload: bytes) -> None:
        """Nobody will ask."""

    def note_loop(self, index: int, facts: dict[str, Any]) -> None:
        """Nobody will join."""

    def note_end_of_loop(self, index: int, payload: bytes) -> None:
        """Nobody will ask."""

    def give_up_recovery(self, reason: str) -> None:
        """There is none."""

    def remove_at_end(self, path: Path) -> None:
        """Nobody outlives this process to do it."""

    def leave(self, path: Path) -> None:
        """Nobody would have removed it."""
