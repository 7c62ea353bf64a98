"""How do bytes get from one rank to the others? Each shows, all meet, each takes.

A rank writes into its own slot, comes to a meeting, and then reads the others' slots. Slots
alternate between even and odd meetings, so the next thing can be written while somebody still
reads the last one, and a journey of n chunks costs n meetings:

    rank 0   write A₀ │ meet │ read B₀, write A₁ │ meet │ read B₁ …
    rank 1   write B₀ │ meet │ read A₀, write B₁ │ meet │ read A₁ …

What was shown at a meeting may be read until one comes to the next meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from typing import TypeVar

import torch

from unisono.c10d.layout import SLOT_BYTES
from unisono.c10d.meeting import Meeting
from unisono.c10d.region import GroupMemory

_VIEWS_AT_MOST = 512
_Views = tuple[list[torch.Tensor], list[torch.Tensor]]  # of even and odd meetings, one a rank
_T = TypeVar("_T")

Meetings = Generator[None, None, None]
"""What a collective is: it yields wherever everybody must come before it can go on."""


class Board:
    """One rank's view of everybody's slots. Final."""

    def __init__(self, region: GroupMemory, meeting: Meeting) -> None:
        self._region = region
        self.meeting = meeting
        self.rank = meeting.rank
        self.num_ranks = meeting.num_ranks
        self._views: dict[tuple[torch.dtype, int], _Views] = {}
        self._made: dict[Hashable, object] = {}

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

    def in_heap(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """View elements that lie in some rank's heap."""
        return self._region.flat(offset, numel, dtype)

    def once(self, make: Callable[..., _T], *arguments: Hashable) -> _T:
        """Return ``make(self, *arguments)``, made at its first call: making views takes longer
        than a short reduction.

        Args:
            make: a function whose result depends on its arguments alone, such as a list of views.
            arguments: for it.
        """
        made: object = self._made.get((make, arguments))
        if made is None:
            if len(self._made) >= _VIEWS_AT_MOST:
                self._made.clear()
            made = self._made[make, arguments] = make(self, *arguments)
        return made  # type: ignore[return-value]

    def close(self) -> None:
        """Forget all views, so that the memory can go."""
        self._views.clear()
        self._made.clear()

    def _slots(self, dtype: torch.dtype, numel: int) -> _Views:
        views = self._views.get((dtype, numel))
        if views is None:
            if len(self._views) >= _VIEWS_AT_MOST:
                self._views.clear()
            slot, flat = self._region.layout.slot, self._region.flat
            even, odd = (
                [flat(slot(rank, parity), numel, dtype) for rank in range(self.num_ranks)]
                for parity in (0, 1)
            )
            views = self._views[dtype, numel] = even, odd
        return views
