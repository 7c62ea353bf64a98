"""Merge the states that shards have of one metric into the state of the whole dataset.

A metric keeps its state in tensors and in lists of tensors; each shard updates its own with its
parts, in the order of the batches. They travel without pickle, and torchmetrics' rules for ranks
merge them in an order that knows no workers: sums along the tree of ``plan.summation``, lists in
the order of the dataset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    ends: list[int] | None  # how many entries a list had after each update; None: it is a tensor

    def added_by(self, update: int) -> list[torch.Tensor]:
        """Give the entries that an update has added to a list."""
        assert self.ends is not None
        return self.tensors[self.ends[update - 1] if update else 0 : self.ends[update]]


States = dict[str, dict[str, MetricState]]
"""What one shard holds of a collection of metrics: by the path of a metric in it, by name."""


def write(states: States) -> bytes:
    """Write what a shard holds: a line of JSON, and behind it safetensors."""
    head: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    for path, of_metric in states.items():
        for name, state in of_metric.items():
            head.append([path, name, len(state.tensors), state.ends])
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
    for path, name, num_tensors, ends in json.loads(head):
        mine = [tensors[str(number)] for number in range(taken, taken + num_tensors)]
        states.setdefault(path, {})[name] = MetricState(mine, ends)
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
    first = next(iter(shards.values()))
    lists = {name: how for name, how in reductions.items() if first[name].ends is not None}
    whole: dict[str, Any] = dict(_lists(shards, lists, plan)) if lists else {}
    for name, reduction in reductions.items():
        if name not in whole:
            tensors = {shard: shards[shard][name].tensors[0] for shard in sorted(shards)}
            whole[name] = _reduced(tensors, reduction, plan)
        elif callable(reduction):
            whole[name] = reduction(whole[name])
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


def _lists(
    shards: Mapping[int, Mapping[str, MetricState]],
    reductions: Mapping[str, Reduction],
    plan: SamplePlan,
) -> dict[str, list[torch.Tensor]]:
    """Join the lists of one metric, all of them in the same order.

    That of the dataset, where all are to be concatenated and a row is a sample; else that of the
    batches and of the shards within a batch; of shards alone, where a list did more than grow.
    """
    by_name = {name: [shards[shard][name] for shard in sorted(shards)] for name in reductions}
    if any(not state.ends for states in by_name.values() for state in states):
        return {
            name: [entry for state in states for entry in state.tensors]
            for name, states in by_name.items()
        }
    order = plan.order(0)
    parts = [
        (batch, shard, plan.shard_indices(order, batch, shard))
        for batch in range(plan.steps_per_epoch)
        for shard in sorted(shards)
        if plan.shard_size(batch, shard)
    ]
    pieces = {
        name: [shards[shard][name].added_by(batch) for batch, shard, _ in parts]
        for name in reductions
    }
    indices = [indices for _, _, indices in parts]
    if all(
        reduction == "cat" and _has_samples_as_rows(pieces[name], indices)
        for name, reduction in reductions.items()
    ):
        at = torch.cat(indices).argsort(stable=True)
        return {
            name: [torch.cat([entry for (entry,) in entries])[at]]
            for name, entries in pieces.items()
        }
    return {name: [entry for added in of for entry in added] for name, of in pieces.items()}


def _has_samples_as_rows(
    pieces: Sequence[Sequence[torch.Tensor]], indices: Sequence[torch.Tensor]
) -> bool:
    """Tell whether every part has added one tensor, alike but for as many rows as samples."""
    return (
        all(
            len(added) == 1 and added[0].dim() > 0 and len(added[0]) == len(of_part)
            for added, of_part in zip(pieces, indices, strict=True)
        )
        and len({(entry.dtype, entry.shape[1:]) for (entry,) in pieces}) == 1
    )
