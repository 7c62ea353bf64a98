"""How far a run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Position:
    """How far a run has come.

    Attributes:
        step: steps done, over the whole run.
        epoch: epochs done.
        batch: global batches done in the epoch under way.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0

    def advance(self, steps_per_epoch: int) -> None:
        """Count one more step."""
        self.step += 1
        self.batch += 1
        if self.batch == steps_per_epoch:
            self.epoch += 1
            self.batch = 0

    def after(self, steps_per_epoch: int) -> Position:
        """Tell the position one step later."""
        later = Position(self.step, self.epoch, self.batch)
        later.advance(steps_per_epoch)
        return later

    def move_to(self, step: int, epoch: int, batch: int) -> None:
        """Go to another place."""
        self.step, self.epoch, self.batch = step, epoch, batch

    def as_json(self) -> dict[str, int]:
        """Write it as plain JSON."""
        return asdict(self)
