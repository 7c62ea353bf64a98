"""When a checkpoint is due: a pure function of steps, epochs and the clock."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "hour": 3600.0}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s??\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Every:
    """An interval in steps, epochs or seconds; exactly one of them is not None."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def read(cls, text: int | str, name: str = "checkpoint_every") -> Every:
        """Understand ``500``, ``"500 steps"``, ``"1 epoch"``, ``"10min"``, ``"90 s"``, ``"2h"``.

        Raises:
            ValueError: it is none of these, or not above 0.
        """
        match = _FORM.fullmatch(f"{text} steps" if isinstance(text, int) else str(text))
        unit = match[2].lower() if match else ""
        if match and float(match[1]) > 0:
            if unit in ("step", "epoch") and float(match[1]).is_integer():
                count = int(float(match[1]))
                return cls(steps=count) if unit == "step" else cls(epochs=count)
            if unit in _UNITS_S:
                return cls(seconds=float(match[1]) * _UNITS_S[unit])
        raise ValueError(
            f'`{name}` must be a number of steps, or a text like "500 steps", '
            f'"1 epoch" or "10min", but is {text!r}.'
        )

    def is_due(self, *, steps: int, epoch_ended: int, seconds: float) -> bool:
        """Tell whether a checkpoint is due.

        Args:
            steps: steps done over the whole run.
            epoch_ended: how many epochs are done if one has just ended, else 0.
            seconds: since the last checkpoint, or since the beginning.
        """
        if self.steps is not None:
            return steps % self.steps == 0
        if self.epochs is not None:
            return epoch_ended > 0 and epoch_ended % self.epochs == 0
        return self.seconds is not None and seconds >= self.seconds
