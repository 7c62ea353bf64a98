"""Metrics in an evaluation: functions and torchmetrics objects, of the rows of all samples.

Shards keep what `forward` returns, with a row for each sample. The rows of all shards are put into
the order of the dataset. The leader calls functions with them once, updates copies of torchmetrics
objects with the rows of one pass after another, as a plain loop does, and sends the results to all.
torchmetrics is never imported here: if a program has one of its objects, it is already loaded.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, final

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import nn

from unisono.plan.samples import SamplePlan
from unisono.programs.account import Account
from unisono.programs.walk import Walk
from unisono.runtime.device import HOST, on_host
from unisono.runtime.notices import add_note, named
from unisono.training.failures import share_outcome
from unisono.training.loss_function import check_function
from unisono.training.sweep import Forward, Sweep

RowFunction = Callable[..., Any]
Rows = dict[str, list[torch.Tensor]]
"""The rows of a shard, by name or by position: one part after another."""


@final
class Metrics:
    """The metrics of one evaluation, with `forward`, which computes their arguments."""

    def __init__(self, metrics: Any, forward: Forward) -> None:
        self.forward = forward
        self._functions, metrics = _taken_apart(metrics)
        self._template = _collection(metrics) if metrics else None
        if self._template is not None:
            self._template.reset()
        for _, metric in _metrics_in(self._template):
            # The program may also have a process group, but one worker has all rows.
            metric.distributed_available_fn = lambda: False

    @property
    def names(self) -> list[str]:
        """The names of results, as far as they are known in advance."""
        return [*self._functions, *({} if self._template is None else self._template)]

    @property
    def facts(self) -> dict[str, str]:
        """What workers must agree on."""
        kinds = {path: type(metric).__name__ for path, metric in _metrics_in(self._template)}
        return kinds | {
            name: str(getattr(function, "__qualname__", type(function).__name__))
            for name, function in self._functions.items()
        }

    def keep(self, rows: Rows, model: nn.Module, batch: Any, num_samples: int) -> None:
        """Add a part's rows to those of its shard; raise TypeError if they are not rows."""
        found = self.forward(model, batch)
        parts = found if isinstance(found, (tuple, list)) and found else (found,)
        is_named = isinstance(found, Mapping) and found
        by_name = found if is_named else {str(at): part for at, part in enumerate(parts)}
        for name, part in by_name.items():
            if not isinstance(part, torch.Tensor) or part.dim() == 0 or len(part) != num_samples:
                is_tensor = isinstance(part, torch.Tensor)
                seen = f"of shape {(*part.shape,)}" if is_tensor else f"a {type(part).__name__}"
                which = f"{name!r}" if is_named else f"part {int(name) + 1} of what it returns"
                raise TypeError(
                    f"`forward` must return tensors with one row for each of the {num_samples} "
                    f"samples, but {which} is {seen}: return numbers for each sample (of texts, "
                    f"the errors and the words of each), and have the metric add them up."
                )
            # A copy: the model may write to the same memory in its next pass.
            rows.setdefault(name, []).append(part.detach().clone())

    def finish(self, told: Mapping[int, bytes], sweep: Sweep) -> dict[str, Any]:
        """Return the results for the rows of all shards, plain numbers by name. Collective."""
        (results,) = share_outcome(
            lambda speak: [sweep.team.broadcast_from_leader(speak, "metrics")],
            lambda: self._results(_joined(told, sweep.plan), sweep),
            sweep.team.world.rank,
        )
        return dict(results)

    def _results(self, rows: Mapping[str, torch.Tensor], sweep: Sweep) -> dict[str, Any]:
        names = sorted(rows, key=lambda name: (len(name), name))
        # Positions are numbers; names come from a dict.
        is_named = not names[0].isdecimal()

        def call(function: RowFunction, chosen: Any = slice(None), where: Any = HOST) -> Any:
            given = {name: rows[name][chosen].to(where) for name in names}
            return function(**given) if is_named else function(*given.values())

        words = ["outputs", "targets"] if len(names) == 2 else [f"part {name}" for name in names]
        for name, function in () if is_named else self._functions.items():
            check_function(f"metrics[{name!r}]", function, words)
        found = {}
        for name, function in self._functions.items():
            try:
                found[name] = _without_memory(name, function, partial(call, function), sweep.model)
            except Exception as error:
                add_note(error, f"This was in the metric {name!r}.")
                raise
        if self._template is not None:
            whole = copy.deepcopy(self._template).to(sweep.device.torch)
            for chosen in sweep.plan.passes():
                call(whole.update, chosen, sweep.device.torch)
            found |= whole.compute()
        return {name: plain(name, value) for name, value in found.items()}


def _without_memory(
    name: str, function: RowFunction, call: Callable[[], Any], model: nn.Module
) -> Any:
    """Return a metric; raise RuntimeError if its next value would depend on this call.

    One worker calls it, so if that is lost, the next one lacks what the function has stored.
    """
    state = itertools.chain(model.parameters(), model.buffers())
    holders = Walk({name: function}, set(map(id, state)), set(map(id, model.modules()))).holders
    before = Account(holders)
    value = call()
    if changes := before.changes():
        after = Account(holders)
        again = call()
        after.put_back()
        if repr(plain(name, again)) != repr(plain(name, value)):
            paths = [path for change in changes for path in change.paths]
            raise RuntimeError(
                f"a metric must depend on its arguments alone, as one worker calls it for all and "
                f"may be lost, but {name!r} depends on what it changes itself ({named(paths)}): "
                f"keep such values in a callback, in `on_validation`."
            )
    return value


def written(rows: Rows) -> bytes:
    """Return a shard's rows as safetensors, for all workers."""
    whole = {n: on_host(_row_by_row(n, parts)).contiguous() for n, parts in rows.items()}
    return to_safetensors(whole)


def _joined(told: Mapping[int, bytes], plan: SamplePlan) -> dict[str, torch.Tensor]:
    """Return the rows of all shards in the order of the dataset."""
    shards = {shard: rows for shard in sorted(told) if (rows := from_safetensors(told[shard]))}
    order = torch.cat([plan.indices(0, shard) for shard in shards]).argsort()
    names = next(iter(shards.values()))
    parts = {name: [rows[name] for rows in shards.values()] for name in names}
    return {name: _row_by_row(name, some)[order] for name, some in parts.items()}


def _row_by_row(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    first, *others = list(dict.fromkeys(tuple(part.shape[1:]) for part in parts))
    if others:
        raise ValueError(
            f"metrics must get rows of one shape, but part {name!r} has rows of {first} and "
            f"{others[0]}, as from batches padded to different lengths: let `forward` return "
            f"sums over the tokens of each sample, or pad to one length there; or return "
            f'`{{"accuracy": (right, tokens)}}` beside the loss.'
        )
    return torch.cat(parts)


def _taken_apart(metrics: Any) -> tuple[dict[str, RowFunction], Any]:
    """Return functions, and what torchmetrics computes; None for the second if there is none."""
    if not isinstance(metrics, Mapping) or isinstance(metrics, _kinds()):
        return {}, metrics
    no_functions = (nn.Module, type, *_kinds())
    functions = {
        name: one
        for name, one in metrics.items()
        if callable(one) and not isinstance(one, no_functions)
    }
    others = {name: one for name, one in metrics.items() if name not in functions}
    return functions, others if others or not functions else None


def _kinds() -> tuple[type, ...]:
    torchmetrics: Any = sys.modules.get("torchmetrics")
    return (torchmetrics.Metric, torchmetrics.MetricCollection) if torchmetrics else ()


def _collection(metrics: Any) -> Any:
    """Copy metrics into a collection in which each has separate states."""
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
        # With compute groups, which metrics share states would depend on the first batch.
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
    """Return every metric of a collection, including nested ones, by path."""
    if collection is None:
        return iter(())
    kind = sys.modules["torchmetrics"].Metric
    return ((path, each) for path, each in collection.named_modules() if isinstance(each, kind))


def plain(name: str, value: Any) -> Any:
    """Convert a result to a number, or lists and dicts of them; raise TypeError if impossible."""
    if isinstance(value, torch.Tensor) and not value.is_complex():
        value = value.item() if value.numel() == 1 else value.tolist()
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(name, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(name, each) for each in value]
    try:
        return value if type(value) is int else float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"the result of a metric must be numbers, but that of {name!r} is of type "
            f"{type(value).__name__}: compute it from the rows that `predict` returns."
        ) from None
