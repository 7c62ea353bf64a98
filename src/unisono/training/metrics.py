"""Metrics in an evaluation: torchmetrics objects, or functions of all rows (``metrics.py``).

::

    Metrics.start ─► ShardMetrics, one a shard ─► states ─► all workers ─► Metrics.finish ─► results

Every shard updates copies of its own of torchmetrics objects. Every worker computes the results
from the same merged state, so they have the same bits everywhere. torchmetrics is never imported
here: if a program has an object of it, it is loaded.

Metrics that are plain functions: called once, with the rows of the whole dataset.

::

    metrics={"auc": lambda outputs, targets: roc_auc_score(targets, outputs[:, 1])}

Shards keep what `forward` gives; their rows travel as states of torchmetrics do and come together
in the order of the dataset. The leader calls the functions and tells the others the results.

A metric keeps its state in tensors and in lists of tensors. They travel without pickle, and
torchmetrics' rules for ranks merge them in an order that knows no workers: sums along the tree of
``plan.summation``, lists one shard after the other.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import nn

from unisono.plan.samples import SamplePlan
from unisono.plan.summation import tree_sum
from unisono.runtime.device import HOST, Device, on_host
from unisono.runtime.workers.team import Team
from unisono.training.failures import heard_by_all
from unisono.training.sweep import Forward

RowFunction = Callable[..., Any]
_PATH = ""  # of rows among states, where the collection itself would be


class Metrics:
    """The metrics of one evaluation. Final.

    Args:
        metrics: torchmetrics objects by name, or a ``MetricCollection``; they are copied. By name
            there may be functions of all rows as well.
        forward: (model, batch) → what they are updated with: a tuple, a dict by name, or one thing.

    Raises:
        TypeError: `metrics` is something else.
    """

    def __init__(self, metrics: Any, forward: Forward) -> None:
        self._forward = forward
        self._functions, metrics = _taken_apart(metrics)
        self._template = _collection(metrics) if metrics else None
        if self._template is not None:
            self._template.reset()
        for _, metric in _metrics_in(self._template):
            # A program may have a process group besides; states are exchanged by us.
            metric.distributed_available_fn = lambda: False

    @property
    def facts(self) -> dict[str, str]:
        """What workers must agree on."""
        kinds = {path: type(metric).__name__ for path, metric in _metrics_in(self._template)}
        return kinds | {
            name: str(getattr(function, "__qualname__", type(function).__name__))
            for name, function in self._functions.items()
        }

    def start(self, device: Device) -> ShardMetrics:
        """Begin the metrics of one shard, which is computed on `device`."""
        collection = copy.deepcopy(self._template)
        return ShardMetrics(
            None if collection is None else collection.to(device.torch),
            self._forward,
            has_rows=bool(self._functions),
        )

    def finish(self, shards: Mapping[int, States], plan: SamplePlan, team: Team) -> dict[str, Any]:
        """Compute the results for the whole dataset. Collective.

        Returns:
            By name, a number, or a list where there are several.

        Raises:
            TypeError: a result is nothing of that kind.
            Exception: what a function has raised on the leader.
        """
        found = {} if self._template is None else self._finish_template(shards, plan)
        if self._functions:
            (results,) = heard_by_all(
                lambda speak: [team.hear_leader(speak, "metrics")],
                lambda: self._call_functions(shards, plan),
                team.world.rank,
            )
            found |= results
        return found

    def _finish_template(self, shards: Mapping[int, States], plan: SamplePlan) -> dict[str, Any]:
        template: Any = self._template
        whole = copy.deepcopy(template).to(HOST)
        num_parts = sum(
            plan.shard_size(batch, shard) > 0
            for batch in range(plan.steps_per_epoch)
            for shard in range(plan.shards)
        )
        for path, metric in _metrics_in(whole):
            held = {shard: states.get(path, {}) for shard, states in shards.items()}
            for name, state in merged(held, _reductions(metric), plan).items():
                setattr(metric, name, state)
            metric._update_count = num_parts
        return {name: plain(name, value) for name, value in whole.compute().items()}

    def _call_functions(self, shards: Mapping[int, States], plan: SamplePlan) -> dict[str, Any]:
        held = {shard: states[_PATH] for shard, states in sorted(shards.items())}
        names = list(next(iter(held.values())))
        order = torch.cat([plan.indices(0, shard) for shard in held]).argsort()
        rows = {
            name: torch.cat([part for of in held.values() for part in of[name].tensors])[order]
            for name in names
        }
        # Positions are numbers, as JSON has them; names come from a dict.
        is_named = not names[0].isdecimal()
        return {
            name: plain(name, function(**rows) if is_named else function(*rows.values()))
            for name, function in self._functions.items()
        }


class ShardMetrics:
    """The metrics of one shard. Final; made by :meth:`Metrics.start`."""

    def __init__(self, collection: Any, forward: Forward, *, has_rows: bool) -> None:
        self._collection, self._forward, self._has_rows = collection, forward, has_rows
        self._rows: dict[str, list[torch.Tensor]] = {}

    def update(self, model: nn.Module, batch: Any, num_samples: int) -> None:
        """Take notice of a part.

        Raises:
            TypeError: functions are to get something else than rows for each sample.
        """
        found = self._forward(model, batch)
        named: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        parts = found if isinstance(found, (tuple, list)) else () if named else (found,)
        if self._has_rows:
            self._keep(named or {str(at): part for at, part in enumerate(parts)}, num_samples)
        if self._collection is not None:
            self._collection.update(*parts, **named)

    def states(self) -> States:
        """Give what the metrics hold."""
        rows = {name: MetricState(parts, True) for name, parts in self._rows.items()}
        return ({_PATH: rows} if rows else {}) | {
            path: {
                name: _state(path, name, getattr(metric, name), is_list=isinstance(default, list))
                for name, default in metric._defaults.items()
            }
            for path, metric in _metrics_in(self._collection)
        }

    def _keep(self, rows: Mapping[str, Any], num_samples: int) -> None:
        """Keep a part's rows."""
        for name, part in rows.items():
            if not isinstance(part, torch.Tensor) or part.dim() == 0 or len(part) != num_samples:
                seen = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
                raise TypeError(
                    f"`forward` must give tensors with one row for each of the {num_samples} "
                    f"samples for metrics that are functions, but {name!r} is {seen}: give "
                    f"rows, and compute numbers from them in the function."
                )
            self._rows.setdefault(name, []).append(part.detach())


def _state(path: str, name: str, value: Any, *, is_list: bool) -> MetricState:
    tensors = value if isinstance(value, list) else [value]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise TypeError(
            f"the states of a metric must be tensors or lists of tensors to be merged, but "
            f"{name!r} of {path!r} holds something else: compute it from the rows that "
            f"`predict` gives."
        )
    return MetricState(tensors, is_list)


def _taken_apart(metrics: Any) -> tuple[dict[str, RowFunction], Any]:
    """Tell functions from what torchmetrics computes; gives both, None for the second if none."""
    if not isinstance(metrics, Mapping) or isinstance(metrics, _kinds()):
        return {}, metrics
    functions = {name: one for name, one in metrics.items() if _is_function(one)}
    others = {name: one for name, one in metrics.items() if name not in functions}
    return functions, others if others or not functions else None


def _is_function(metric: Any) -> bool:
    return callable(metric) and not isinstance(metric, (nn.Module, type, *_kinds()))


def _kinds() -> tuple[type, ...]:
    torchmetrics: Any = sys.modules.get("torchmetrics")
    return (torchmetrics.Metric, torchmetrics.MetricCollection) if torchmetrics else ()


def _collection(metrics: Any) -> Any:
    """Copy metrics into a collection in which each has states of its own."""
    torchmetrics: Any = sys.modules.get("torchmetrics")
    kinds = _kinds()
    wanted = (
        "torchmetrics objects or functions of (outputs, targets), by name, such as "
        '`{"f1": MulticlassF1Score(10)}`'
    )
    if isinstance(metrics, Mapping) and not isinstance(metrics, kinds):
        for name, metric in metrics.items():
            if not isinstance(metric, kinds):
                raise TypeError(
                    f"`metrics` must be {wanted}, but {name!r} is of type {type(metric).__name__}: "
                    f"derive it from `torchmetrics.Metric`, or return its value from the loss "
                    f"function, which is averaged."
                )
        # In groups, as it has them itself, which metrics share states depends on the first batch.
        return torchmetrics.MetricCollection(
            {name: copy.deepcopy(metric) for name, metric in metrics.items()}, compute_groups=False
        )
    if torchmetrics is None or not isinstance(metrics, torchmetrics.MetricCollection):
        raise TypeError(f"`metrics` must be {wanted}, but is of type {type(metrics).__name__}.")
    return torchmetrics.MetricCollection(
        {name: copy.deepcopy(metric) for name, metric in metrics.items(keep_base=True)},
        prefix=metrics.prefix,
        postfix=metrics.postfix,
        compute_groups=False,
    )


def _metrics_in(collection: Any) -> Iterator[tuple[str, Any]]:
    """Give every metric of a collection, those within others too, by its path."""
    if collection is None:
        return iter(())
    kind = sys.modules["torchmetrics"].Metric
    return ((path, each) for path, each in collection.named_modules() if isinstance(each, kind))


def _reductions(metric: Any) -> dict[str, Reduction]:
    utilities = sys.modules["torchmetrics.utilities.data"]
    words = {
        utilities.dim_zero_sum: "sum",
        utilities.dim_zero_mean: "mean",
        utilities.dim_zero_cat: "cat",
    }
    return {name: words.get(how, how) for name, how in metric._reductions.items()}


def plain(name: str, value: Any) -> Any:
    """Make plain numbers of a result: one, or lists and dicts of them.

    Raises:
        TypeError: it is nothing of that kind.
    """
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return float(value) if value.numel() == 1 else value.tolist()
    if hasattr(value, "tolist"):  # an array or a number of numpy's
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(name, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(name, each) for each in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"the result of a metric must be numbers, but that of {name!r} is of type "
            f"{type(value).__name__}: compute it from the rows that `predict` gives."
        ) from None


Reduction = Callable[[Any], Any] | str | None
"""``"sum"``, ``"mean"``, ``"cat"``, or what a metric wants to have done with what is gathered."""


@dataclass(slots=True)
class MetricState:
    """One state of one shard."""

    tensors: list[torch.Tensor]  # the entries of a list, or a tensor alone
    is_list: bool


States = dict[str, dict[str, MetricState]]
"""What one shard holds of a collection of metrics: by the path of a metric in it, by name."""


def write_states(states: States) -> bytes:
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


def read_states(told: bytes) -> States:
    """Read what :func:`write_states` has written."""
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
        batches = range(plan.steps_per_epoch)
        terms = [
            tensor.double() * sum(plan.shard_size(batch, shard) for batch in batches)
            for shard, tensor in tensors.items()
        ]
        mean = tree_sum(terms, torch.add) / plan.num_samples
        return mean.to(in_order[0].dtype) if in_order[0].is_floating_point() else mean
    if len(in_order) == 1 and reduction is None:
        return in_order[0]
    stacked = torch.stack(in_order)
    return reduction(stacked) if callable(reduction) else stacked
