"""Replicas whose parts travel through a process group; every worker adds up a slice of everything.

::

    worker 0   parts ─┐            ┌─► slice 0 of all parts, added ─┐            ┌─► all sums
                      │ all_to_all │       in tree order            │ all_gather │
    worker 1   parts ─┘            └─► slice 1 of all parts, added ─┘            └─► all sums

A worker's parts stay in its own memory until the sums are everybody's. If the group breaks before,
the survivors compute what the lost ones had, make another group and exchange again. Whether the
sums are everybody's is decided on the control block, not by the group.

On CPUs the group is gloo's. Never run on GPUs, nor with NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.errors import UnisonoError
from unisono.exchange.arena import Region, Slot, size_of
from unisono.exchange.communicator import BrokenError, Communicator
from unisono.exchange.homes import StateKeys
from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.parts import OwnParts, Parts, pieces_within
from unisono.exchange.replicas import ReplicaExchange
from unisono.plan.slices import Piece
from unisono.plan.summation import Node
from unisono.workers.launcher_messages import Live
from unisono.workers.memory import ALIGNMENT_BYTES, Memory, aligned

_ATTEMPTS = 3


class GroupExchange(ReplicaExchange):
    """An exchange of replicas. Final; arguments as of :class:`~.protocol.Exchange`."""

    _communicator: Communicator | None = None

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`~.protocol.Exchange`; all sums are here then, so none can be lost."""
        team = self._team
        if not team.meet(purpose):
            return self._take_over()
        if team.size == 1:
            self._present = self._sum.add()
            return None
        membership, failures = team.membership, [""]
        for _ in range(_ATTEMPTS):
            heard = team.gather(self._move().encode(), "sums of a step")
            if team.membership != membership:
                return self._take_over()
            failures = [f"{said.decode()} on rank {rank}" for rank, said in heard.items() if said]
            if not failures:
                return None
            self._close()
        raise UnisonoError(
            f"the process group must carry gradients, but has failed {_ATTEMPTS} times "
            f"({failures[0]}): use another exchange, such as `UNISONO_EXCHANGE=shared`."
        )

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`~.protocol.Exchange`; :meth:`gather` has done so."""
        return self._present

    def unbind(self) -> None:
        """See :class:`~.protocol.Exchange`."""
        self._close()
        super().unbind()

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        self._slots = self.memory.arena.plan.parameters
        # Slices are whole cache lines: the last one may reach past the last parameter.
        room = size_of(self._slots) + ALIGNMENT_BYTES * self._team.world.world_size
        self._own = OwnParts(self._slots, self.memory.arena.flags, room, self.device)
        self._parts = Parts(self._own)
        super()._bind(keys, live)

    def _plan_sum(self) -> None:
        """Divide the bytes of all parameters, laid out one after the other, into equal slices."""
        team, division = self._team, self.division
        if team.size == 1:
            self._sum = OrderedSum(self._parts, division.parts, division.num_shards, self.pieces)
            sums = self._own.gradients[0]
        else:
            self._num_bytes = aligned(-(-size_of(self._slots) // team.size))
            held = [division.parts_of[rank] for rank in team.membership.ranks]
            start = self._num_bytes * team.position
            received = ReceivedParts(self._slots, held, start, self._num_bytes, self._parts)
            self._received, self._num_parts = received, [len(parts) for parts in held]
            self._mine = held[team.position]
            pieces = list(pieces_within(self._slots, start, start + self._num_bytes))
            self._sum = OrderedSum(received, division.parts, division.num_shards, pieces)
            memory = Memory.private(self._num_bytes * team.size)
            self._all_sums = memory.flat(0, memory.num_bytes, torch.uint8)
            sums = Region(memory, 0, self._slots)
        self.whole = sums.tensors()
        self.totals = [sums.piece(n, 0, slot.numel) for n, slot in enumerate(self._slots)]

    def _move(self) -> str:
        """Bring all sums here, and this worker's to the others. Collective.

        Returns:
            Why that has failed, in words; empty if it has not.
        """
        team, num_bytes = self._team, self._num_bytes
        try:
            if self._communicator is None or self._communicator.membership != team.membership:
                self._close()
                self._communicator = Communicator(team)
            self._communicator.all_to_all(
                self._received.everything,
                by_slices(self._own, self._mine, team.size, num_bytes),
                from_each=[num_bytes * count for count in self._num_parts],
                to_each=[num_bytes * len(self._mine)] * team.size,
            )
            self._present = self._sum.add()
            self._communicator.all_gather(self._all_sums, self._received.part_of_first_shard)
        except BrokenError as error:
            return str(error)
        return ""

    def _take_over(self) -> list[Node]:
        more = self.division.take_over()
        self._plan_sum()
        return more

    def _close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None


def by_slices(
    own: OwnParts, parts: Sequence[Node], num_slices: int, num_bytes: int
) -> torch.Tensor:
    """Give slice 0 of all parts, then slice 1 of all parts, and so on, as bytes.

    Args:
        own: has the parts of this worker.
        parts: which.
        num_slices: how many there are.
        num_bytes: the length of each.
    """
    flat = [own.memory(part.lo).flat(0, num_slices * num_bytes, torch.uint8) for part in parts]
    if len(flat) == 1:
        return flat[0]
    starts = range(0, num_slices * num_bytes, num_bytes)
    return torch.cat([part[start : start + num_bytes] for start in starts for part in flat])


class ReceivedParts:
    """One slice of everybody's parts. Final.

    Args:
        slots: where each parameter lies in a part.
        held: the parts of each worker, in the order in which they come.
        start: the first byte of the slice.
        num_bytes: the length of the slice.
        published: knows which parameters a part has gradients for.

    Attributes:
        everything: what comes from all workers, as bytes.
    """

    def __init__(
        self,
        slots: tuple[Slot, ...],
        held: Sequence[Sequence[Node]],
        start: int,
        num_bytes: int,
        published: Parts,
    ) -> None:
        order = [part.lo for parts in held for part in parts]
        memory = Memory.private(num_bytes * len(order))
        self.everything = memory.flat(0, memory.num_bytes, torch.uint8)
        # As if each part lay there as a whole: only its slice does.
        self._regions = {
            lo: Region(memory, num_bytes * at - start, slots) for at, lo in enumerate(order)
        }
        at = num_bytes * order.index(0)
        self.part_of_first_shard = self.everything[at : at + num_bytes]
        self.flags = published.flags

    def views(self, lo: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """View pieces of the part in slot `lo`, as vectors."""
        region = self._regions[lo]
        return [region.piece(piece.index, piece.start, piece.stop) for piece in pieces]
