"""How far a run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Position:
    """How far a run has come."""

    step: int = 0  # steps done, over the whole run
    epoch: int = 0  # epochs done
    batch: int = 0  # global batches done in the epoch under way

    def move_to(self, step: int, epoch: int, batch: int) -> None:
        """Go to another place."""
        self.step, self.epoch, self.batch = step, epoch, batch

    def as_json(self) -> dict[str, int]:
        """Write it as plain JSON."""
        return asdict(self)
