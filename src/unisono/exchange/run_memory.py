"""What the workers of a host share in one run, whatever carries its gradients.

Published parts, records of shards, both copies of the buffers, snapshots. When a worker is lost,
what it had finished is read from here; a replacement takes the run's state from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unisono.exchange.arena import Arena, Plan, Slot, lay_out, size_of
from unisono.exchange.homes import StateKeys
from unisono.exchange.snapshots import Snapshots
from unisono.workers.team import Team

# Beside the state, a snapshot has room for this much and some times the parameters: optimizers that
# are not element-wise keep their state there, and programs averages of weights. Pages that are not
# written do not exist.
_BLOB_BYTES = 1 << 26
_BLOB_TIMES_PARAMETERS = 8


def plan_of(
    parameters: Mapping[str, torch.Tensor],
    fixed: Mapping[str, torch.Tensor],
    states: Mapping[str, torch.Tensor],
    buffers: tuple[Slot, ...],
    shards: int,
) -> Plan:
    """Plan an arena for such tensors; `states` are examples of the optimizer's."""
    slots, fixed_slots = lay_out(parameters), lay_out(fixed)
    room = _BLOB_BYTES + _BLOB_TIMES_PARAMETERS * (size_of(slots) + size_of(fixed_slots))
    return Plan(slots, fixed_slots, lay_out(states), buffers, shards, room)


class RunMemory:
    """One run's memory on this host. Final.

    Args:
        keys: of the optimizer's state that lies there.
        key: names the memory; None: `previous` is used again where all have it and it fits.
        previous: of an earlier loop of the same run.
        new_key: names a new memory.

    Attributes:
        snapshots: both slots of them.
    """

    def __init__(
        self,
        plan: Plan,
        keys: StateKeys,
        team: Team,
        *,
        key: int | None,
        previous: RunMemory | None,
        new_key: int,
    ) -> None:
        arena: Arena | None = None if previous is None else previous.arena
        if key is not None or not _have_all(arena, team):
            arena = None
        if arena is None or arena.plan != plan:
            key = new_key if key is None else key
            arena = Arena(team.memory(key, Arena.num_bytes(plan)), plan, key)
        self.arena: Arena = arena
        self.snapshots = Snapshots(arena, keys)

    def newest(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Read what is kept beside the newest snapshot: facts and tensors."""
        slot = self.newest_slot
        return self.snapshots.facts(slot), self.snapshots.extra(slot)

    @property
    def newest_slot(self) -> int:
        """The slot of the newest snapshot."""
        slot = self.snapshots.newest
        assert slot is not None, "a loop begins with a snapshot"
        return slot

    @property
    def copy_of_buffers(self) -> int:
        """Which copy of the buffers was the present one in the newest snapshot."""
        return int(self.snapshots.facts(self.newest_slot)["copy of buffers"])


def _have_all(arena: Arena | None, team: Team) -> bool:
    """Tell whether every worker has this arena: a replacement may have missed its loop."""
    mine = b"none" if arena is None else str(arena.key).encode()
    return len(set(team.gather(mine, "choice of memory").values())) == 1
