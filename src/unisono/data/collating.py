"""Collate samples into a batch, and seed the generators that samples and batches draw from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

from torch.utils.data import default_collate

from unisono.errors import LoadingError
from unisono.plan.seeds import seed_of
from unisono.programs.generators import OwnGenerators
from unisono.runtime.device import seed_generators

Collate = Callable[[list[Any]], Any]
_NAMED_AT_MOST = 8


@final
class Collator:
    """Makes batches, and seeds generators for what is read. See :func:`fetch.fetcher`.

    `own`: the program's generators; `is_programs`: whether the program's code makes batches.
    """

    def __init__(
        self, seed: int, stream: str, collate_fn: Collate | None, dataset: Any, length: int
    ) -> None:
        self._seed, self._stream, self._collate_fn = seed, stream, collate_fn
        self._length, self._epoch = length, -1
        self.is_programs = collate_fn is not None
        self.own = OwnGenerators(dataset=dataset, collate_fn=collate_fn)

    def seed_for(self, what: str, epoch: int, number: int = 0, repeat: int = 0) -> None:
        """Seed every generator for a sample, or for several, the first of which has this number.

        `repeat`: how often the sample was read before in the epoch.
        """
        place = epoch * self._length + number
        word = seed_of(f"{self._stream} {what}", self._seed, place, repeat)
        seed_generators(word)
        if self.own.found:
            self.own.seed(word)

    def begin_epoch(self, epoch: int) -> bool:
        """Return whether the epoch is new; then find generators that the program has created."""
        if epoch == self._epoch:
            return False
        self._epoch = epoch
        self.own.search()
        return True

    def collate(
        self, numbers: Sequence[int], samples: Any, epoch: int, first_repeat: int = 0
    ) -> Any:
        """Return a batch of the samples with these numbers, at least one."""
        if self._collate_fn is not None:
            self.seed_for("collate", epoch, numbers[0], first_repeat)
        try:
            return (self._collate_fn or default_collate)(samples)
        except Exception as error:
            raise LoadingError(
                f"samples must fit into one batch, but to collate samples {listed(numbers)} "
                f"raised {said(error)}: {_remedy(samples, self._collate_fn)}.",
                indices=tuple(numbers),
            ) from error


def _remedy(samples: Any, collate_fn: Any) -> str:
    if collate_fn is None:
        return "give all samples one form, or pass a DataLoader that has a `collate_fn`"
    with suppress(Exception):
        if texts := [name for name, part in samples[0].items() if isinstance(part, str)]:
            return f"leave texts out of samples, here with `dataset.remove_columns({texts})`"
    return "look at what `collate_fn` gets, a list of samples"


def listed(numbers: Sequence[Any]) -> str:
    """Return a list of samples in words; of many, only the first ones."""
    shown = ", ".join(map(repr, numbers[:_NAMED_AT_MOST]))
    return f"{shown}, …" if len(numbers) > _NAMED_AT_MOST else shown


def said(error: Exception) -> str:
    """Return an error's name and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
