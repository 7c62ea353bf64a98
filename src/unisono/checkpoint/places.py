"""Where a run's snapshots lie in its shared memory: two slots in turn, and marks that say which.

::

    marks   │ sequence u64 of slot 0 │ of slot 1 │ busy u8 │ busy u8 │
    slot    │ a copy of the state    │ blob: what it means           │      twice

A slot whose mark is 0 is not whole; the one with the larger mark is the newest. A mark is cleared
before its slot is written and set once all have written their share, so one whole snapshot is
always there, even if a worker dies meanwhile. Busy slots are being written to the disk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

_MARKS = struct.Struct("<QQBB")
MARKS_BYTES = _MARKS.size


@dataclass(frozen=True, slots=True)
class Places:
    """Positions in bytes."""

    key: int  # the memory
    num_bytes: int  # its size
    marks_at: int  # where the marks are
    slots_at: tuple[int, int]  # where the two slots begin
    slot_bytes: int  # the size of each
    blob_at: int  # where in a slot the blob begins

    def as_json(self) -> dict[str, Any]:
        """Write it as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Places:
        """Read what :meth:`as_json` wrote; other names are ignored."""
        named = {name.name: value[name.name] for name in fields(cls)}
        return cls(**{**named, "slots_at": tuple(named["slots_at"])})

    def mark_at(self, slot: int) -> int:
        """Say where the mark of a slot lies."""
        return self.marks_at + 8 * slot

    def busy_at(self, slot: int) -> int:
        """Say where it stands whether a slot is being written to the disk."""
        return self.marks_at + 16 + slot

    def marks(self, read: Callable[[int, int], bytes]) -> tuple[int, int]:
        """Read the marks; `read` gives bytes from (offset, count)."""
        first, second, _, _ = _MARKS.unpack(read(self.marks_at, MARKS_BYTES))
        return first, second

    def is_busy(self, slot: int, read: Callable[[int, int], bytes]) -> bool:
        """Tell whether a slot is being written to the disk."""
        return read(self.busy_at(slot), 1) != b"\0"

    def newest(self, read: Callable[[int, int], bytes]) -> int | None:
        """Find the slot of the newest whole snapshot; None while there is none."""
        first, second = self.marks(read)
        if not first and not second:
            return None
        return 0 if first > second else 1
