"""Exact means over a dataset: every sample once, the same bits on any number of workers.

The dataset is cut into global batches and shards like an epoch of training, without shuffling.
Each shard adds up its own sums in the order of the batches; the shards' sums are added in the
canonical order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from unisono.comm.team import Team
from unisono.data.fetch import Collate, fetcher
from unisono.data.loader import Loader, Place
from unisono.engine.buffers import buffers_put_back
from unisono.engine.loss import read_loss
from unisono.engine.randomness import generators_put_back, seed_generators
from unisono.engine.threads import num_threads
from unisono.errors import MismatchError
from unisono.plan.samples import SamplePlan
from unisono.plan.seeds import seed_of
from unisono.plan.summation import tree_sum
from unisono.world import threads_per_worker

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
) -> dict[str, float]:
    """Average the loss and its scalars over a dataset. Collective: every rank calls it.

    Args:
        model: in whatever mode; it evaluates in ``eval()`` mode and gets its own back, and its
            buffers too, with which every pass begins.
        loss: as for training.
        dataset: map-style.
        plan: of the dataset, without shuffling.
        team: the workers.
        loader_workers, collate_fn: as for training.

    Returns:
        By name, the mean over all samples (or the true weight); the same on every worker.
    """
    fetch = fetcher(dataset, seed=plan.seed, stream="evaluate", collate_fn=collate_fn)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with (
            torch.no_grad(),
            generators_put_back(),
            num_threads(threads_per_worker()),
            buffers_put_back(model) as put_buffers_back,
            Loader(
                fetch, plan, num_processes=loader_workers, num_batches=plan.steps_per_epoch
            ) as loader,
        ):

            def compute(shards: Sequence[int]) -> dict[int, Pairs]:
                sums: dict[int, Pairs] = {shard: {} for shard in shards}
                for batch in range(plan.steps_per_epoch):
                    for shard in shards:
                        num_samples = plan.shard_size(batch, shard)
                        if num_samples:
                            data = loader.batch(Place(0, batch, shard), shards)
                            seed_generators(seed_of("evaluate", plan.seed, batch, shard))
                            put_buffers_back()
                            value = loss(model, data)
                            _add(sums[shard], read_loss(value, num_samples).scalars)
                return sums

            sums = _of_all_shards(compute, plan.shards, team)
    finally:
        for module, mode in modes:
            module.training = mode
    return _means([sums[shard] for shard in range(plan.shards)])


def _of_all_shards(
    compute: Callable[[Sequence[int]], dict[int, Pairs]], num_shards: int, team: Team
) -> dict[int, Pairs]:
    """Compute every shard on some worker; those of one that is lost once more on the others."""
    known: dict[int, Pairs] = {}
    while len(known) < num_shards:
        missing = [shard for shard in range(num_shards) if shard not in known]
        bounds = [len(missing) * part // team.size for part in range(team.size + 1)]
        mine = missing[bounds[team.position] : bounds[team.position + 1]]
        message = json.dumps(list(compute(mine).items())).encode()
        for heard in team.gather(message, "evaluate").values():
            known |= dict(json.loads(heard))
    return known


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
