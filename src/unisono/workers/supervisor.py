"""What does a worker ask of whoever started it? Memory, and decisions about the membership.

Three implementations: our launcher, at the other end of a channel
(:class:`~.launcher_link.LauncherLink`); workers that another launcher started
(:class:`~.external.ExternallyLaunched`); and a process that is alone
(:class:`~.single_process.SingleProcess`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unisono.workers.membership import Membership

if TYPE_CHECKING:
    from unisono.workers.memory import Memory


@dataclass(frozen=True, slots=True)
class Passed:
    """Something the workers did together is over; a replacement takes over what came of it.

    Attributes:
        payload: what came of it.
        loop: for a loop: what was told when it began.
    """

    payload: bytes
    loop: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """A replacement has caught up with the others and belongs to the membership now.

    Attributes:
        membership: the workers, this one among them.
        loop: for a loop that had begun: what was told then.
        is_alone: nobody else is there; what is shared may be torn.
    """

    membership: Membership
    loop: dict[str, Any] | None
    is_alone: bool


class Supervisor(Protocol):
    """The one who started this worker."""

    @property
    def can_replace(self) -> bool:
        """Whether lost workers are made up for, so that snapshots are of use."""

    def note_ready(self) -> None:
        """Tell that the program can be run again from its start to replace a worker."""

    def memory(self, key: int, num_bytes: int) -> Memory:
        """Share memory with every worker that asks with the same `key`; zero at first.

        Collective, for those who have found each other: every rank calls it.
        """

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """Stand still at a meeting until it is decided who goes on."""

    def entry(self, index: int, name: str) -> Passed | Live:
        """Ask, as a replacement, what came of the `index`-th thing done together."""

    def note_result(self, index: int, name: str, payload: bytes) -> None:
        """Tell what came of the `index`-th thing done together."""

    def note_loop(self, index: int, facts: dict[str, Any]) -> None:
        """Tell that a loop has begun and can be joined."""

    def note_end_of_loop(self, index: int, payload: bytes) -> None:
        """Tell that a loop has ended, and where."""

    def give_up_recovery(self, reason: str) -> None:
        """Tell that from now on a lost worker cannot be made up for."""

    def remove_at_end(self, path: Path) -> None:
        """Have a file removed when the job has ended, however it ends; there may be none yet."""

    def leave(self, path: Path) -> None:
        """Take that back: whatever has this name stays."""
