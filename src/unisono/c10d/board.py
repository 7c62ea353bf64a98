"""Moves bytes between ranks: each shows some, all meet, each takes.

A rank writes into its own slot, comes to a meeting, and then reads the others' slots. Slots
alternate between even and odd meetings, so the next thing can be written while somebody still
reads the last one, and a journey of n chunks costs n meetings:

    rank 0   write A₀ │ meet │ read B₀, write A₁ │ meet │ read B₁ …
    rank 1   write B₀ │ meet │ read A₀, write B₁ │ meet │ read A₁ …

What was shown at a meeting may be read until this rank comes to the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator

import torch

from unisono.c10d.group_memory import SLOT_BYTES, GroupMemory
from unisono.c10d.meeting import Meeting

_VIEWS_AT_MOST = 512

Meetings = Generator[None, None, None]
"""What a collective is: it yields wherever everybody must come before it can go on."""


class Board:
    """One rank's view of everybody's slots. Final."""

    def __init__(self, region: GroupMemory, meeting: Meeting) -> None:
        self.meeting = meeting
        self.rank = meeting.rank
        self.num_ranks = meeting.num_ranks
        # Making views takes longer than a short reduction.
        self._slots = functools.lru_cache(_VIEWS_AT_MOST)(functools.partial(_slots_of, region))

    def mine(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """View where this rank writes what it shows at the next meeting."""
        return self._slots(dtype, numel)[(self.meeting.num_met + 1) % 2][self.rank]

    def chunks(self, numel: int, dtype: torch.dtype, parts: int = 1) -> Iterator[tuple[int, int]]:
        """Cut a vector so that `parts` chunks fit side by side into a slot.

        Returns:
            (start, stop) of each chunk; at least one, as an empty vector has a meeting too.
        """
        each = max(SLOT_BYTES // (parts * dtype.itemsize), 1)
        if numel <= each:
            return iter(((0, numel),))
        return ((start, min(start + each, numel)) for start in range(0, numel, each))

    def shown(self, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
        """View what each rank has shown at the last meeting."""
        return self._slots(dtype, numel)[self.meeting.num_met % 2]

    def close(self) -> None:
        """Forget all views, so that the memory can go."""
        self._slots.cache_clear()


def _slots_of(
    region: GroupMemory, dtype: torch.dtype, numel: int
) -> tuple[list[torch.Tensor], ...]:
    """View the slots of even and of odd meetings, one of each a rank."""
    slot, ranks = region.layout.slot, range(region.layout.world_size)
    return tuple(
        [region.memory.flat(slot(rank, parity), numel, dtype) for rank in ranks]
        for parity in (0, 1)
    )
