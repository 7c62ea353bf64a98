"""What one loop over steps covers: the samples, how they are read, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.data.data_reading import Reading, is_stream
from unisono.data.epoch_order import EpochOrder
from unisono.data.fetch import Fetch, fetcher
from unisono.data.loader import Loader, progress_at
from unisono.engine.state.run_state import Position
from unisono.plan.samples import ENDLESS, SamplePlan
from unisono.programs.forked import ForkedCopy
from unisono.runtime.device import Device
from unisono.runtime.notices import say
from unisono.runtime.whole import check_whole

_LEFT = "loops left"  # in ``run.last``: by totals, from which loop to which


@dataclass(frozen=True, slots=True)
class Totals:
    """Where a run ends; the first total to be reached counts."""

    epochs: int | None  # in total; None: as many as there are steps for
    steps: int | None  # in total; None: as many as there are epochs for

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise ValueError(
                "`epochs` or `steps` must say when the run ends: pass `epochs=3`, for example."
            )
        for name, total in (("epochs", self.epochs), ("steps", self.steps)):
            if total is not None:
                check_whole(name, total, at_least=0)

    def are_reached(self, position: Position) -> bool:
        """Return whether a run at this position is finished."""
        return (self.steps is not None and position.step >= self.steps) or (
            self.epochs is not None and position.epoch >= self.epochs
        )

    def are_passed(self, position: Position) -> bool:
        """Return whether a run is past these totals, and so in another loop."""
        return (self.steps is not None and position.step > self.steps) or (
            self.epochs is not None and (position.epoch, position.batch) > (self.epochs, 0)
        )

    def note_left(self, last: dict[str, Any], loop: int) -> None:
        """Record in ``run.last`` that loop number `loop` has ended before these totals.

        A checkpoint of a later loop then shows that this one was over, even if what it ended with
        was not saved, or is no longer kept.
        """
        ranges = last.setdefault(_LEFT, {}).setdefault(repr(self), [])
        if ranges and ranges[-1][1] == loop - 1:
            ranges[-1][1] = loop
        else:
            ranges.append([loop, loop])

    def were_left(self, last: Mapping[str, Any], loop: int) -> bool:
        """Return whether :meth:`note_left` was called for this loop."""
        if _LEFT not in last:  # asked in every step
            return False
        return any(a <= loop <= z for a, z in last[_LEFT].get(repr(self), ()))

    def end_step(self, plan: SamplePlan, position: Position) -> int:
        """Return the number of steps that a run will have done; the current one if it is over.

        If a batch sampler cuts epochs, later epochs are assumed to have as many steps as this one.
        """
        ends = [] if self.steps is None else [self.steps]
        if self.epochs is not None:
            epochs_to_go = max(0, self.epochs - position.epoch)
            steps_per_epoch = plan.at(position.epoch).steps_per_epoch
            ends.append(position.step - position.batch + epochs_to_go * steps_per_epoch)
        return max(position.step, min(ends))

    def num_batches(self, plan: SamplePlan, position: Position) -> int:
        """Return the number of global batches from the first epoch's first to the run's end.

        Earlier epochs may have had other lengths, so the rest is counted from here.
        """
        here = position.epoch * plan.steps_per_epoch + position.batch
        return here + self.end_step(plan, position) - position.step


@dataclass(slots=True)
class LoopPlan:
    """One loop of a run; see :meth:`unisono.Run.steps` for its arguments."""

    reading: Reading  # the dataset, and how it is read
    # which samples are computed where; without `shards`, those of a checkpoint may replace them
    samples: SamplePlan
    totals: Totals  # where the run ends

    @property
    def program(self) -> dict[str, Any]:
        """The program's objects that run when samples are read, by name."""
        return {"dataset": self.reading.dataset, "collate_fn": self.reading.collate_fn}

    def fetch(self, stream: str = "train") -> Fetch:
        """Return the function that reads batches; raises as :func:`fetcher` does."""
        plan = self.samples
        order = plan.order_of
        return fetcher(
            self.reading.dataset,
            seed=plan.seed,
            stream=stream,
            collate_fn=self.reading.collate_fn,
            batch_size=plan.pass_size if plan.in_blocks else plan.batch_size,
            # A stream's parts are dealt sample by sample.
            shards=1 if plan.in_blocks or plan.groups > 1 else plan.shards,
            keys=order.keys if isinstance(order, EpochOrder) and order.has_keys else None,
        )

    def loader(
        self,
        fetch: Fetch,
        position: Position,
        device: Device,
        done: Position | None = None,
        look: Callable[[], ForkedCopy] | None = None,
        tell: Callable[[str], None] = say,
    ) -> Loader:
        """Return a loader from `position` on; `done` is that of a run that does not train."""
        samples, totals = self.samples.at(position.epoch), self.totals
        here = samples.steps_between(samples.epoch, position.epoch) + position.batch
        return Loader(
            fetch,
            samples,
            progress=progress_at(
                samples,
                position.step - here,
                None if done is None else (done.step, done.epoch),
                in_order=is_stream(self.reading.dataset),
            ),
            num_processes=self.reading.loader_workers,
            num_batches=ENDLESS if totals.steps is None else here + totals.steps - position.step,
            num_epochs=ENDLESS if totals.epochs is None else totals.epochs,
            device=device,
            look=look,
            tell=tell,
        )
