"""Exact means over a dataset: every sample once, the same bits on any number of workers.

The dataset is cut into global batches and shards like an epoch of training, without shuffling.
What the loss function says of each is added without rounding, so the mean is that of a plain loop
over the same passes with ``math.fsum``: which worker made a pass, and when, has no part in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from unisono.data.collating import Collate
from unisono.device import seed_generators
from unisono.errors import MismatchError
from unisono.plan.exact import ExactSum
from unisono.plan.samples import SamplePlan
from unisono.plan.seeds import seed_of
from unisono.step.loss import read_loss
from unisono.train import metric_states
from unisono.train.metric_states import States
from unisono.train.metrics import Metrics, ShardMetrics
from unisono.train.sweep import agree_on, by_all_workers, sweep
from unisono.workers.team import Team

Sums = dict[str, tuple[ExactSum, ExactSum]]
"""By name, the sum of what is averaged and the sum of the weights."""


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
    metrics: Metrics | None = None,
    facts: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, Any]:
    """Average the loss and its scalars over a dataset. Collective: every rank calls it.

    Args:
        model: in whatever mode; it evaluates in ``eval()`` mode and gets its own back, and its
            buffers too, with which every pass begins.
        loss: as for training.
        dataset: as for training.
        plan: of the dataset, without shuffling.
        team: the workers.
        loader_workers, collate_fn, pin_memory: as for training.
        metrics: what else to compute, in a pass of its own over each part.
        facts: what must not differ between the workers, by name.

    Returns:
        By name, the mean over all samples (or the true weight), and the results of the metrics;
        the same on every worker.

    Raises:
        MismatchError: the workers do not evaluate the same.
        ValueError: a mean and a metric have the same name.
    """
    measured_by = metrics.facts if metrics else None
    more = {"`metrics`": measured_by, **facts}
    agree_on(dataset, plan, team, loader_workers, "evaluate", **more)
    with sweep(model, dataset, plan, loader_workers, collate_fn, pin_memory) as parts_of:

        def compute(shards: Sequence[int]) -> bytes:
            sums: dict[int, Sums] = {shard: {} for shard in shards}
            measured: dict[int, ShardMetrics] = {}
            for part in parts_of(shards):
                value = read_loss(loss(model, part.data), part.num_samples)
                _add(sums[part.shard], value.scalars)
                if metrics is not None:
                    if part.shard not in measured:
                        measured[part.shard] = metrics.start()
                    measured[part.shard].update(model, part.data)
            states = {shard: each.states() for shard, each in measured.items()}
            return _write(sums) + b"\n" + metric_states.write(states)

        known: dict[int, Sums] = {}
        states: dict[int, States] = {}
        for heard in by_all_workers(compute, plan.shards, team, "evaluate"):
            told, _, states_told = heard.partition(b"\n")
            known |= _read(told)
            states |= metric_states.read(states_told)
        means = _means([known[shard] for shard in range(plan.shards)])
        if metrics is None:
            return means
        # Some shuffle or sample what they have gathered.
        seed_generators(seed_of("metrics", plan.seed))
        return _joined(means, metrics.finish(states, plan))


def _joined(means: dict[str, float], results: dict[str, Any]) -> dict[str, Any]:
    twice = means.keys() & results.keys()
    if twice:
        raise ValueError(
            f"`metrics` must have other names than the loss function's means, but both have "
            f"{sorted(twice)}: name the metrics otherwise."
        )
    return means | results


def _add(sums: Sums, scalars: dict[str, tuple[float, float]]) -> None:
    for name, numbers in scalars.items():
        for total, number in zip(sums.setdefault(name, _nothing()), numbers, strict=True):
            total.add(number)


def _write(sums: dict[int, Sums]) -> bytes:
    told = {
        shard: {name: [total.as_json() for total in pair] for name, pair in each.items()}
        for shard, each in sums.items()
    }
    return json.dumps(list(told.items())).encode()


def _read(told: bytes) -> dict[int, Sums]:
    return {
        shard: {name: (ExactSum(*total), ExactSum(*weight)) for name, (total, weight) in of.items()}
        for shard, of in json.loads(told)
    }


def _means(shards: list[Sums]) -> dict[str, float]:
    """Average over shards, one entry each in shard order; empty where a shard had no samples."""
    names = list(next(sums for sums in shards if sums))
    if any(sums and set(sums) != set(names) for sums in shards):
        raise MismatchError(
            f"the loss function must return the same names for every shard, but returned "
            f"{sorted(map(sorted, map(list, shards)))}: return the same keys always."
        )
    means = {}
    for name in names:
        whole = _nothing()
        for sums in filter(None, shards):
            for total, more in zip(whole, sums[name], strict=True):
                total.add_all(more)
        sum_of_all, weight_of_all = (total.rounded() for total in whole)
        means[name] = sum_of_all / weight_of_all if weight_of_all else float("nan")
    return means


def _nothing() -> tuple[ExactSum, ExactSum]:
    return ExactSum(), ExactSum()
