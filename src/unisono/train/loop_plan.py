"""What one loop over steps goes over: the samples, how they are read, and where it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.data.collating import Collate
from unisono.data.data_reading import Reading
from unisono.data.fetch import Fetch, fetcher
from unisono.data.loader import Loader
from unisono.device import Device
from unisono.plan.samples import SamplePlan
from unisono.state.position import Position
from unisono.train.totals import Totals
from unisono.whole import check_whole


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """One loop of a run; see :meth:`unisono.Run.steps` for its arguments.

    Attributes:
        dataset: the samples.
        samples: which of them are computed where.
        totals: how far the run is to come.
        loader_workers, collate_fn, pin_memory: how samples are read.

    Raises:
        TypeError, ValueError: `loader_workers` is no count.
    """

    dataset: Any
    samples: SamplePlan
    totals: Totals
    loader_workers: int = 0
    collate_fn: Collate | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        check_whole("loader_workers", self.loader_workers, at_least=0)

    @classmethod
    def of(cls, reading: Reading, samples: SamplePlan, totals: Totals) -> LoopPlan:
        """Plan a loop over what a program reads."""
        return cls(
            reading.dataset,
            samples,
            totals,
            reading.loader_workers,
            reading.collate_fn,
            reading.pin_memory,
        )

    def fetch(self) -> Fetch:
        """Make the function that reads batches; raises as :func:`fetcher` does."""
        return fetcher(
            self.dataset,
            seed=self.samples.seed,
            collate_fn=self.collate_fn,
            batch_size=self.samples.batch_size,
            shards=self.samples.shards,
        )

    def loader(self, fetch: Fetch, position: Position, device: Device) -> Loader:
        """Make the loader of a loop that begins at `position`, with batches on `device`."""
        return Loader(
            fetch,
            self.samples,
            num_processes=int(self.loader_workers),
            num_batches=self.totals.num_batches(self.samples, position),
            device=device,
            pin_memory=bool(self.pin_memory),
        )
