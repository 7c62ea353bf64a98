"""Who started this worker, and what does that one do for it?

========================  ===================  ====================  ==============================
started by                implementation       shared memory         a lost worker
========================  ===================  ====================  ==============================
our launcher              LauncherLink         the launcher's        is replaced, or the others
                                                                     continue without it
another one (torchrun …)  ExternallyLaunched   made by rank 0        is named in an error
nobody                    SingleProcess        private               —
========================  ===================  ====================  ==============================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from unisono.plainfile import open_plain
from unisono.workers.control_block import ControlBlock
from unisono.workers.launcher_messages import Live, Passed, Told
from unisono.workers.membership import Membership
from unisono.workers.memory import Memory
from unisono.workers.proc import create_memory
from unisono.world import World

# Sends everyone a message, for a purpose, and returns everyone's by rank. Collective.
Gather = Callable[[bytes, str], dict[int, bytes]]


class Supervisor(Protocol):
    """Whoever started this worker. What is written out here holds where nobody supervises it."""

    world: World  # this worker's place
    control: ControlBlock  # the control block on which all workers meet
    incarnation: int = 0  # how many workers had this rank before
    can_replace: bool = False  # whether lost workers are replaced, so that snapshots are of use
    # whether nobody started this process as one of several workers, be it of one
    is_alone: bool = False
    explains_waits: bool = False  # whether somebody else says so when a wait takes long
    # the ranks of each of several hosts; empty: all are on this one
    ranks_of_host: tuple[tuple[int, ...], ...] = ()
    address: str = ""  # where other hosts reach this one, if there are any
    # whether all can begin again what they do just now, where that is how a lost worker is made
    # up for
    can_go_back: bool = True
    # tells the number of the newest that is known to be whole; None: there are none
    newest_snapshot: Callable[[], int] | None = None
    agreed_snapshot: int = 0  # the number of that to which all go back
    # the facts of the loop in which all do so; None: they begin it again, or are in none
    agreed_loop: Mapping[str, Any] | None = None

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        """Share memory with every worker that asks with the same `key`; zero at first.

        Collective if the workers make it themselves: every rank calls it. `gather` is for them.
        """
        fd = self.memory_fd(key, num_bytes, gather)
        try:
            return Memory.map(fd, num_bytes)
        finally:
            os.close(fd)

    def memory_fd(self, key: int, num_bytes: int, gather: Gather, path: str = "") -> int:
        """Do the same, and give the descriptor of that memory, which is the caller's.

        Args:
            path: of a file of that size, which is to be that memory; every worker can open it.
        """

    def tell(self, message: Told) -> None:
        """Tell something that needs no answer; nobody listens."""
        return

    def look(self) -> None:
        """Mark on the control block which workers have died, if nobody else does."""
        return

    def show_wait(self, what: str) -> None:
        """Show what this process waits for elsewhere than at a meeting; empty: it continues."""
        return

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """Stand still after some meetings until it is decided who continues: everyone does."""
        return Membership.of(self.world.world_size)

    def outcome(self, index: int, name: str) -> bytes | None:
        """Tell the outcome of the `index`-th joint call if others have it, as they have gone on."""
        return None

    def catch_up(self, index: int, name: str) -> Passed | Live:
        """Ask, as a replacement, for the outcome of the `index`-th joint call: there was none."""
        return Live(Membership.of(self.world.world_size), None, is_alone=self.is_alone)

    def write_checkpoint(self, slot: Mapping[str, Any], *, wait: bool) -> bool:
        """Have a snapshot written as a checkpoint, once earlier ones are written.

        Args:
            slot: where it lies and where it goes, as :class:`unisono.checkpoint.writer.Kept`.
            wait: return only when it is on the disk, or has failed.

        Returns:
            False if this process has to write it itself.
        """
        return False

    def lock_directory(self, directory: str) -> bool:
        """Keep other jobs out of a run directory; False if this process has to do it itself.

        Raises:
            CheckpointError: another job is in it.
        """
        return False


class SingleProcess(Supervisor):
    """A process that nobody started as a worker: nobody supervises it. Final."""

    is_alone = True

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.control = ControlBlock.private()

    def memory_fd(self, key: int, num_bytes: int, gather: Gather, path: str = "") -> int:
        """Take memory that this process shares with nobody but its forks."""
        if path:
            return open_plain(Path(path), os.O_RDWR)
        return create_memory("unisono-memory", num_bytes)
