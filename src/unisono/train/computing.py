"""How are passes through a model computed? What a run is told about it, in one place.

Whatever changes bits belongs to the run's identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from unisono.train.channels import lay_out_channels_last, with_channels_last
from unisono.train.precision import DTYPES, in_precision


@dataclass(frozen=True, slots=True)
class Computing:
    """How passes through a model are computed, in training, evaluation and prediction alike.

    Attributes:
        precision: one of :data:`DTYPES`.
        channels_last: whether images have their channels last in memory.

    Raises:
        ValueError: there is no such precision.
        TypeError: a switch is neither True nor False.
    """

    precision: str
    channels_last: bool

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            raise ValueError(
                f"`precision` must be one of {tuple(DTYPES)}, but is {self.precision!r}."
            )
        if not isinstance(self.channels_last, bool):
            raise TypeError(
                f"`channels_last` must be True or False, but is {self.channels_last!r}."
            )

    @property
    def fixed(self) -> dict[str, Any]:
        """What of it changes bits, by name, as plain JSON, for the identity of a run."""
        return {"precision": self.precision, "channels_last": self.channels_last}

    def prepare(self, model: nn.Module) -> None:
        """Do to a model what is done once.

        Raises:
            ValueError: it cannot be computed so.
        """
        if self.channels_last:
            lay_out_channels_last(model)

    def of(self, compute: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
        """Have a loss or a forward function computed so."""
        if self.channels_last:
            compute = with_channels_last(compute)
        return in_precision(self.precision, compute)
