"""Merge the states that shards have of one metric into the state of the whole dataset.

A metric keeps its state in tensors and in lists of tensors; each shard updates its own with its
parts, in the order of the batches. They travel without pickle, and torchmetrics' rules for ranks
merge them in an order that knows no workers: sums along the tree of ``plan.summation``, lists one
shard after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors

from unisono.plan.samples import SamplePlan
from unisono.plan.summation import tree_sum
from unisono.runtime.device import on_host

Reduction = Callable[[Any], Any] | str | None
"""``"sum"``, ``"mean"``, ``"cat"``, or what a metric wants to have done with what is gathered."""


@dataclass(slots=True)
class MetricState:
    """One state of one shard."""

    tensors: list[torch.Tensor]  # the entries of a list, or a tensor alone
    is_list: bool


States = dict[str, dict[str, MetricState]]
"""What one shard holds of a collection of metrics: by the path of a metric in it, by name."""


def write(states: States) -> bytes:
    """Write what a shard holds: a line of JSON, and behind it safetensors."""
    head: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    for path, of_metric in states.items():
        for name, state in of_metric.items():
            head.append([path, name, len(state.tensors), state.is_list])
            for tensor in state.tensors:
                # A copy: several metrics may keep the same one, which a file may not.
                plain = on_host(tensor).clone(memory_format=torch.contiguous_format)
                tensors[str(len(tensors))] = plain
    return json.dumps(head).encode() + b"\n" + to_safetensors(tensors)


def read(told: bytes) -> States:
    """Read what :func:`write` has written."""
    head, _, data = told.partition(b"\n")
    tensors = from_safetensors(data)
    states: States = {}
    taken = 0
    for path, name, num_tensors, is_list in json.loads(head):
        mine = [tensors[str(number)] for number in range(taken, taken + num_tensors)]
        states.setdefault(path, {})[name] = MetricState(mine, is_list)
        taken += num_tensors
    return states


def merged(
    shards: Mapping[int, Mapping[str, MetricState]],
    reductions: Mapping[str, Reduction],
    plan: SamplePlan,
) -> dict[str, Any]:
    """Merge the states that shards hold of one metric.

    Args:
        shards: by shard, the states of those that have samples; not empty.
        reductions: what is done with each state.
        plan: of the dataset, without shuffling.

    Returns:
        By name, a tensor or a list of tensors.
    """
    whole: dict[str, Any] = {}
    for name, reduction in reductions.items():
        states = {shard: shards[shard][name] for shard in sorted(shards)}
        if next(iter(states.values())).is_list:
            entries = [entry for state in states.values() for entry in state.tensors]
            whole[name] = reduction(entries) if callable(reduction) else entries
        else:
            tensors = {shard: state.tensors[0] for shard, state in states.items()}
            whole[name] = _reduced(tensors, reduction, plan)
    return whole


def _reduced(tensors: Mapping[int, torch.Tensor], reduction: Reduction, plan: SamplePlan) -> Any:
    """Make one tensor of those of all shards, which are in shard order."""
    in_order = list(tensors.values())
    if reduction == "sum":
        return tree_sum(in_order, torch.add)
    if reduction == "mean":
        # Over samples, as all means are; torchmetrics would take that of ranks.
        terms = [tensor.double() * _num_samples(plan, shard) for shard, tensor in tensors.items()]
        mean = tree_sum(terms, torch.add) / plan.num_samples
        return mean.to(in_order[0].dtype) if in_order[0].is_floating_point() else mean
    if len(in_order) == 1 and reduction is None:
        return in_order[0]
    stacked = torch.stack(in_order)
    return reduction(stacked) if callable(reduction) else stacked


def _num_samples(plan: SamplePlan, shard: int) -> int:
    return sum(plan.shard_size(batch, shard) for batch in range(plan.steps_per_epoch))
