"""Metrics in an evaluation: torchmetrics objects, or functions of all rows (``row_metrics.py``).

::

    Metrics.start ─► ShardMetrics, one a shard ─► states ─► all workers ─► Metrics.finish ─► results

Every shard updates copies of its own of torchmetrics objects. Every worker computes the results
from the same merged state, so they have the same bits everywhere. torchmetrics is never imported
here: if a program has an object of it, it is loaded.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from unisono.device import HOST, Device
from unisono.plan.samples import SamplePlan
from unisono.train.metric_states import MetricState, Reduction, States, merged
from unisono.train.row_metrics import RowFunction, RowMetrics, ShardRows, plain
from unisono.train.sweep import Forward
from unisono.workers.team import Team


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
        functions, metrics = _taken_apart(metrics)
        self._of_rows = RowMetrics(functions) if functions else None
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
        return kinds | ({} if self._of_rows is None else self._of_rows.facts)

    def start(self, device: Device) -> ShardMetrics:
        """Begin the metrics of one shard, which is computed on `device`."""
        collection = copy.deepcopy(self._template)
        return ShardMetrics(
            None if collection is None else collection.to(device.torch),
            None if self._of_rows is None else ShardRows(),
            self._forward,
        )

    def finish(self, shards: Mapping[int, States], plan: SamplePlan, team: Team) -> dict[str, Any]:
        """Compute the results for the whole dataset. Collective.

        Args:
            shards: by shard, the states of those that have samples.
            plan: of the dataset.
            team: the workers.

        Returns:
            By name, a number, or a list where there are several.

        Raises:
            TypeError: a result is nothing of that kind.
            Exception: what a function has raised.
        """
        found = {} if self._template is None else self._finish_template(shards, plan)
        return found if self._of_rows is None else found | self._of_rows.finish(shards, plan, team)

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


class ShardMetrics:
    """The metrics of one shard. Final; made by :meth:`Metrics.start`."""

    def __init__(self, collection: Any, rows: ShardRows | None, forward: Forward) -> None:
        self._collection, self._rows, self._forward = collection, rows, forward
        self._ends: dict[tuple[str, str], list[int]] = {}

    def update(self, model: nn.Module, batch: Any, num_samples: int) -> None:
        """Take notice of a part."""
        found = self._forward(model, batch)
        if self._rows is not None:
            self._rows.add(found, num_samples)
        if self._collection is None:
            return
        if isinstance(found, Mapping):
            self._collection.update(**found)
        else:
            self._collection.update(*(found if isinstance(found, (tuple, list)) else (found,)))
        for path, metric in _metrics_in(self._collection):
            for name, default in metric._defaults.items():
                if isinstance(default, list):
                    self._ends.setdefault((path, name), []).append(len(getattr(metric, name)))

    def states(self) -> States:
        """Give what the metrics hold.

        Raises:
            TypeError: a state holds something else than tensors.
        """
        rows = {} if self._rows is None else self._rows.states()
        return rows | {
            path: {
                name: self._state(path, name, getattr(metric, name), default)
                for name, default in metric._defaults.items()
            }
            for path, metric in _metrics_in(self._collection)
        }

    def _state(self, path: str, name: str, value: Any, default: Any) -> MetricState:
        is_list = isinstance(default, list)
        tensors = value if isinstance(value, list) else [value]
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise TypeError(
                f"the states of a metric must be tensors or lists of tensors to be merged, but "
                f"{name!r} of {path!r} holds something else: compute it from the rows that "
                f"`predict` gives."
            )
        ends = self._ends.get((path, name), [])
        has_grown = isinstance(value, list) and ends == sorted(ends)
        return MetricState(tensors, (ends if has_grown else []) if is_list else None)


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
