"""Exact means over a dataset: every sample once, the same bits on any number of workers.

The dataset is cut into global batches and shards like an epoch of training, without shuffling.
Each shard adds up its own sums in the order of the batches; the shards' sums are added in the
canonical order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from unisono.comm.team import Team
from unisono.data.fetch import Collate
from unisono.engine.loss import read_loss
from unisono.errors import MismatchError
from unisono.plan.samples import SamplePlan
from unisono.plan.summation import tree_sum
from unisono.train.sweep import agree_on, by_all_workers, sweep

Pairs = dict[str, tuple[float, float]]


def evaluate(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    dataset: Any,
    plan: SamplePlan,
    team: Team,
    *,
    loader_workers: int = 0,
    collate_fn: Collate | None = None,
    pin_memory: bool = False,
) -> dict[str, float]:
    """Average the loss and its scalars over a dataset. Collective: every rank calls it.

    Args:
        model: in whatever mode; it evaluates in ``eval()`` mode and gets its own back, and its
            buffers too, with which every pass begins.
        loss: as for training.
        dataset: map-style.
        plan: of the dataset, without shuffling.
        team: the workers.
        loader_workers, collate_fn, pin_memory: as for training.

    Returns:
        By name, the mean over all samples (or the true weight); the same on every worker.

    Raises:
        MismatchError: the workers do not evaluate the same.
    """
    agree_on(plan, team, "evaluate")
    with sweep(model, dataset, plan, loader_workers, collate_fn, pin_memory) as parts_of:

        def sums_of(shards: Sequence[int]) -> bytes:
            sums: dict[int, Pairs] = {shard: {} for shard in shards}
            for part in parts_of(shards):
                value = read_loss(loss(model, part.data), part.num_samples)
                _add(sums[part.shard], value.scalars)
            return json.dumps(list(sums.items())).encode()

        known: dict[int, Pairs] = {}
        for heard in by_all_workers(sums_of, plan.shards, team, "evaluate"):
            known |= dict(json.loads(heard))
    return _means([known[shard] for shard in range(plan.shards)])


def _add(sums: Pairs, scalars: Pairs) -> None:
    for name, (total, weight) in scalars.items():
        total_before, weight_before = sums.get(name, (0.0, 0.0))
        sums[name] = (total_before + total, weight_before + weight)


def _means(shards: list[Pairs]) -> dict[str, float]:
    """Average over shards, one entry each in shard order; empty where a shard had no samples."""
    names = list(next(pairs for pairs in shards if pairs))
    if any(pairs and set(pairs) != set(names) for pairs in shards):
        raise MismatchError(
            f"the loss function must return the same names for every shard, but returned "
            f"{sorted(map(sorted, map(list, shards)))}: return the same keys always."
        )
    means = {}
    for name in names:
        total = tree_sum([pairs.get(name, (0.0, 0.0))[0] for pairs in shards], lambda a, b: a + b)
        weight = tree_sum([pairs.get(name, (0.0, 0.0))[1] for pairs in shards], lambda a, b: a + b)
        means[name] = total / weight if weight else float("nan")
    return means
