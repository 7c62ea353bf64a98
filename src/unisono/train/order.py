"""In which order does a run take the samples, and do all workers mean the same one?

Without a sampler the order follows from the plan. One that a sampler says is compared by its hash:
between the workers when an epoch begins, and with the one that the epoch has begun in when a run
goes on in the midst of it.
"""

from __future__ import annotations

from typing import Any

from unisono.data.epoch_order import EpochOrder, Sampler
from unisono.data.length import is_stream, length_of
from unisono.errors import MismatchError
from unisono.plan.samples import SamplePlan
from unisono.state.run_state import RunState
from unisono.whole import check_whole
from unisono.workers.team import Team


def plan_samples(
    dataset: Any,
    batch_size: int,
    shuffle: bool | None,
    sampler: Sampler | None,
    *,
    shards: int,
    seed: int,
) -> SamplePlan:
    """Plan which samples are computed where; arguments as of :meth:`unisono.Run.steps`.

    Raises:
        TypeError: the dataset has no samples or no length, or `batch_size` is not whole.
        ValueError: a number does not fit, or two say the order.
    """
    batch_size = check_whole("batch_size", batch_size, at_least=1)
    length = length_of(dataset)
    if is_stream(dataset):
        _check_order_is_its_own(dataset, shuffle, sampler)
        shuffle = False
    if sampler is None or not length:
        shuffle = shuffle is None or bool(shuffle)
        return SamplePlan(length, batch_size, shards, shuffle, seed)
    if shuffle:
        raise ValueError(
            "`shuffle` must be left out where a `sampler` says the order, but is "
            f"{shuffle!r}: let the sampler shuffle."
        )
    order = sampler if isinstance(sampler, EpochOrder) else EpochOrder(sampler, seed, length)
    return SamplePlan(order.num_samples, batch_size, shards, False, seed, order.name, order)


class SamplerOrder:
    """The order that a sampler says, in one loop; without a sampler there is nothing to do. Final.

    Args:
        plan: has the sampler.
        kept: how far the run has come, and in which order its epoch has begun.
        team: the workers.
    """

    def __init__(self, plan: SamplePlan, kept: RunState, team: Team) -> None:
        self._plan, self._kept, self._team = plan, kept, team

    @property
    def facts(self) -> dict[str, str]:
        """Tell the order of the epoch under way apart from others; empty without a sampler."""
        if self._plan.sampler is None:
            return {}
        epoch = self._kept.position.epoch
        return {f"the sampler's order of epoch {epoch}": self._plan.digest(epoch)}

    def check(self) -> None:
        """Refuse to go on in the midst of an epoch in another order than it has begun in.

        Raises:
            MismatchError: the sampler says another.
        """
        order, position = self.facts, self._kept.position
        if order and position.batch and self._kept.last.get("order", order) != order:
            raise MismatchError(
                f"`sampler` must give the order again in which epoch {position.epoch} has "
                f"begun, but {self._plan.sampler} gives another: give it what it was given, or "
                f'begin anew with `resume="never"`.'
            )

    def begin_epoch(self, *, is_agreed: bool) -> None:
        """Begin an epoch, if the next step is its first. Collective, unless that is agreed on.

        Raises:
            MismatchError: the workers' samplers say different orders.
        """
        if self._plan.sampler is None or self._kept.position.batch:
            return
        order = self.facts
        if not is_agreed:
            self._team.agree(order, "order of an epoch")
        self._kept.last["order"] = order


def _check_order_is_its_own(dataset: Any, shuffle: bool | None, sampler: Sampler | None) -> None:
    given = "`sampler`" if sampler is not None else "`shuffle`" if shuffle else None
    if given is not None:
        raise ValueError(
            f"{given} must be left out for an IterableDataset, which has an order of its own, but "
            f"is given: let {type(dataset).__name__} shuffle, or give it `__getitem__`."
        )
