"""From samples to a batch; and what samples and batches may draw, from seeds of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from unisono.engine.randomness import seed_generators
from unisono.errors import LoadingError
from unisono.plan.seeds import seed_of

Collate = Callable[[list[Any]], Any]
_NAMED_AT_MOST = 8


class Collator:
    """Makes batches, and seeds generators for what is read. Final.

    Args:
        seed: the run's, from which a dataset's own random numbers come.
        stream: what is read for (``"train"``, ``"evaluate"``), with random numbers of its own.
        collate_fn: makes a batch of a list of samples; None: torch's ``default_collate``.
    """

    def __init__(self, seed: int, stream: str, collate_fn: Collate | None) -> None:
        self._seed, self._stream, self._collate_fn = seed, stream, collate_fn

    def seed_for(self, what: str, place: Sequence[int]) -> None:
        """Seed every generator for a sample, for several, or for a batch."""
        seed_generators(seed_of(f"{self._stream} {what}", self._seed, *place))

    def collate(self, numbers: Sequence[int], samples: Any, place: Sequence[int]) -> Any:
        """Make a batch of samples.

        Args:
            numbers: which they are.
            samples: in that order.
            place: what the random numbers of a ``collate_fn`` depend on.

        Raises:
            LoadingError: they do not fit together.
        """
        if self._collate_fn is not None:
            self.seed_for("collate", place)
        try:
            return (self._collate_fn or default_collate)(samples)
        except Exception as error:
            raise LoadingError(
                f"samples must fit into one batch, but to collate samples {listed(numbers)} "
                f"raised {said(error)}: give all samples one form, or pass a `collate_fn`.",
                indices=tuple(numbers),
            ) from error


def listed(numbers: Sequence[int]) -> str:
    """Name samples, the first of them where they are many."""
    shown = ", ".join(map(str, numbers[:_NAMED_AT_MOST]))
    return f"{shown}, …" if len(numbers) > _NAMED_AT_MOST else shown


def said(error: Exception) -> str:
    """Name an error with its message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
