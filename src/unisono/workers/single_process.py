"""A process that nobody started as a worker: a team of one, with nobody to wait for."""

from __future__ import annotations

from unisono.workers.control_block import ControlBlock
from unisono.workers.memory import Memory
from unisono.workers.proc import create_memory
from unisono.workers.supervisor import Gather, Supervisor
from unisono.world import World


class SingleProcess(Supervisor):
    """Nobody supervises this process, and it supervises nobody. Final."""

    is_alone = True

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.control = ControlBlock.private()

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        """Take memory that this process shares with nobody."""
        return Memory.anonymous(num_bytes)

    def memory_fd(self, key: int, num_bytes: int, gather: Gather) -> int:
        """Take memory that only forks of this process can map."""
        return create_memory("unisono-memory", num_bytes)
