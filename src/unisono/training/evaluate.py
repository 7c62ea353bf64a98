"""Exact means over a dataset: every sample once, the same bits on any number of workers.

The loss function's results for all batches are added without rounding, so the mean is that of a
plain loop over the same batches with ``math.fsum``, whichever worker computed a pass, and when.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from unisono.data.data_reading import Reading
from unisono.engine.state.contents import check_module
from unisono.engine.step.loss import PendingLosses, name_of, read_loss
from unisono.errors import MismatchError
from unisono.plan.exact_sum import ExactSum
from unisono.training.computing import Computing
from unisono.training.failures import note_origin
from unisono.training.first_steps import LabelCounts
from unisono.training.loop_plan import LoopPlan, Totals
from unisono.training.loss_function import check_forward
from unisono.training.metrics import Metrics, Rows, written
from unisono.training.model_placement import over_cuts
from unisono.training.rehearsals import Rehearsals
from unisono.training.run_context import RunContext
from unisono.training.sweep import Forward, Sweep

# The host waits for a device once in so many passes; until then the device keeps their batches.
_PENDING_AT_MOST = 16
_ALONE = "(0,)"  # the name of features in a tuple of one

Sums = dict[str, tuple[ExactSum, ExactSum]]
"""By name, the sum of the values and the sum of their weights."""


@final
class Passes:
    """Passes without training, computed like those of a trainer."""

    def __init__(
        self, run: RunContext, computing: Computing, loss: Forward, embed: Forward | None
    ) -> None:
        self._run, self._computing = run, computing
        self.loss = self.prepared(loss)
        self.embed = None if embed is None else self.prepared(embed)
        self._to_rehearse: dict[Any, Iterator[int]] = {}

    def prepared(self, compute: Forward, *, to_first: bool = False) -> Forward:
        """Return a loss or forward function that computes as the program wishes."""
        computed = self._computing.of(compute, self._run.device)
        return over_cuts(self._run.kept.model, computed, to_first=to_first)

    def rehearsed(self, name: str, compute: Forward) -> Forward:
        """Return a function that is rehearsed the first times that it runs without training."""
        return Rehearsals.without_training(self._run, name, compute, self._to_rehearse)

    def metrics(self, metrics: Any, forward: Forward) -> Metrics | None:
        """Prepare metrics; raise TypeError if they, or `forward`, have the wrong type."""
        if metrics is None:
            return None
        check_forward(forward)
        return Metrics(metrics, self.rehearsed("forward", self.prepared(forward, to_first=True)))

    def sweep(
        self, name: str, reading: Reading, model: nn.Module | None, **functions: Any
    ) -> Sweep:
        """Return a pass; see :class:`Sweep`."""
        loop = LoopPlan(reading, self._run.plan_pass(reading), Totals(epochs=1, steps=None))
        return Sweep(self._run, name, loop, None if model is None else checked(model), functions)

    def validation(
        self,
        reading: Reading,
        sets: Mapping[str, Any],
        measured: Metrics | None,
        model: Callable[[], nn.Module] | None,
    ) -> Callable[[], dict[str, Any]]:
        """Return a function that evaluates named datasets; raise if one cannot be evaluated."""
        whole = {name: reading.of_another(one).in_dataset_order() for name, one in sets.items()}
        for each in whole.values():
            self._run.plan_pass(each)

        def find() -> dict[str, Any]:
            found = {name: self.evaluate(each, measured, model) for name, each in whole.items()}
            return {
                f"{name}/{key}" if name else key: value
                for name, means in found.items()
                for key, value in means.items()
            }

        return find

    def evaluate(
        self, reading: Reading, measured: Metrics | None, model: Callable[[], nn.Module] | None
    ) -> dict[str, Any]:
        """Evaluate as :meth:`Trainer.evaluate` does; `model` returns the model. Collective."""

        def compute() -> bytes:
            with self._computing.under_way(self._run.kept.model):
                forward = None if measured is None else measured.forward
                used = {"loss": self.loss, "embed": self.embed, "forward": forward}
                other = None if model is None else model()
                sweep = self.sweep("evaluate", reading, other, **used)
                loss = self.rehearsed("loss", self.loss)
                if self.embed is not None:
                    embed = self.rehearsed("embed", self.embed)
                    return json.dumps(evaluate_whole(sweep, embed, loss, measured)).encode()
                if sweep.device.is_host:  # on a device, the host would wait in each pass
                    loss = LabelCounts(self._run).watching(loss)
                return json.dumps(evaluate(sweep, loss, measured)).encode()

        found: dict[str, Any] = json.loads(self._run.replicated_calls.together("evaluate", compute))
        return found


def checked(model: nn.Module) -> nn.Module:
    """Return a model that a program has passed; raise TypeError if it is not a module."""
    check_module("model", model)
    return model


def model_to_validate(make: Callable[[nn.Module], nn.Module], trained: nn.Module) -> nn.Module:
    """Return the model that `validate_model` returns; raise TypeError if it is not a module."""
    made = make(trained)
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"`validate_model` must return a torch.nn.Module, but returned one of type "
            f"{type(made).__name__}: return the model to validate, as `ema.model` does."
        )
    return made


def evaluate(
    sweep: Sweep, loss: Callable[[nn.Module, Any], Any] | None, metrics: Metrics | None
) -> dict[str, Any]:
    """Return means of the loss, if there is one, over a dataset, and metrics."""
    model = sweep.model
    sweep.agree("evaluate", **{"`metrics`": metrics.facts if metrics else None})
    with sweep.under_way() as parts_of:

        def compute(shards: Sequence[int]) -> dict[int, bytes]:
            sums: dict[int, Sums] = {shard: {} for shard in shards}
            rows: dict[int, Rows] = {shard: {} for shard in shards}
            pending = PendingLosses(sweep.device.copies())
            for part in parts_of(shards):
                if loss is not None:
                    value = read_loss(_in_evaluation(loss, model, part.data), part.num_samples)
                    pending.losses.append((part.shard, value))
                    if len(pending.losses) == _PENDING_AT_MOST:
                        _add_all(sums, pending)
                if metrics is not None:
                    metrics.keep(rows[part.shard], model, part.data, part.num_samples)
            _add_all(sums, pending)
            return {v: _write(sums[v]) + b"\n" + written(rows[v]) for v in shards}

        said = sorted(sweep.by_all_workers(compute, "evaluate").items())
        heard = {shard: words.partition(b"\n") for shard, words in said}
        means = {} if loss is None else _means([_read(words) for words, _, _ in heard.values()])
        if metrics is None:
            return means
        # Some metrics shuffle or sample the rows.
        sweep.seed("metrics")
        told = {shard: rows for shard, (_, _, rows) in heard.items()}
        return _joined(means, metrics.finish(told, sweep))


def evaluate_whole(
    sweep: Sweep, embed: Forward, loss: Callable[[nn.Module, Any], Any], metrics: Metrics | None
) -> dict[str, Any]:
    """Return means of a loss of whole batches; the leader computes it from all rows."""
    plan, device = sweep.plan, sweep.device

    def of_batches(*rows: torch.Tensor, **named: torch.Tensor) -> dict[str, float]:
        sums: Sums = {}
        for batch, chosen in enumerate(plan.passes()):
            sweep.seed("evaluate whole", batch)
            parts = tuple(leaf[chosen].to(device.torch) for leaf in rows)
            by_name = {name: leaf[chosen].to(device.torch) for name, leaf in named.items()}
            features: Any = by_name or (parts if len(parts) > 1 else parts[0])
            if _ALONE in by_name:
                features = (by_name[_ALONE],)
            value = read_loss(loss(sweep.model, features), len(chosen))
            _add(sums, value.numbers())
        return _means([sums])

    def rows_of(model: nn.Module, batch: Any) -> Any:
        found = embed(model, batch)
        is_alone = isinstance(found, (tuple, list)) and len(found) == 1
        return {_ALONE: found[0]} if is_alone else found

    found = evaluate(sweep, None, Metrics({"loss": of_batches}, rows_of))["loss"]
    return found if metrics is None else _joined(found, evaluate(sweep, None, metrics))


def _in_evaluation(loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> Any:
    """Compute a loss; add to its exceptions that this was an evaluation."""
    try:
        return loss(model, batch)
    except Exception as error:
        note_origin(
            error,
            "in an evaluation, with the model in `eval()` and without gradients. If its output "
            "then differs, like a detector's boxes, let the loss return what it can "
            "(`if not model.training: return torch.zeros(())`), and measure outputs with "
            "`validate_metrics` and `validate_forward` (of `evaluate`: `metrics` and `forward`)",
        )
        raise


def _joined(means: dict[str, float], results: dict[str, Any]) -> dict[str, Any]:
    twice = means.keys() & results.keys()
    if twice:
        raise ValueError(
            f"`metrics` must have other names than the loss function's means, but both have "
            f"{sorted(twice)}: rename the metrics."
        )
    return means | results


def _add_all(sums: dict[int, Sums], pending: PendingLosses) -> None:
    for shard, loss in pending.read():
        _add(sums[shard], loss.numbers())


def _add(sums: Sums, scalars: dict[str, tuple[float, float]]) -> None:
    for name, numbers in scalars.items():
        for total, number in zip(sums.setdefault(name, _nothing()), numbers, strict=True):
            total.add(number)


def _write(sums: Sums) -> bytes:
    return json.dumps(
        {name: [total.as_json() for total in pair] for name, pair in sums.items()}
    ).encode()


def _read(told: bytes) -> Sums:
    return {
        name: (ExactSum(*total), ExactSum(*weight))
        for name, (total, weight) in json.loads(told).items()
    }


def _means(shards: list[Sums]) -> dict[str, float]:
    """Return means over shards; a shard without samples has no sums."""
    shards = [sums for sums in shards if sums]
    named = {key: name_of(key) for key in shards[0]}
    is_twice = len(dict(named.values())) < len(named)
    if is_twice or any(sums.keys() != named.keys() for sums in shards):
        returned = sorted(sorted(name_of(key)[0] for key in sums) for sums in shards)
        raise MismatchError(
            f"the loss function must return the same names for every shard, but returned "
            f"{returned}: always return the same keys, each always as an integer (a count) or "
            f"never."
        )
    means = {}
    for key, (name, is_count) in named.items():
        whole = _nothing()
        for sums in shards:
            for each, more in zip(whole, sums[key], strict=True):
                each.add_all(more)
        total, weight = (each.rounded() for each in whole)
        means[name] = int(total) if is_count else total / weight if weight else float("nan")
    return means


def _nothing() -> tuple[ExactSum, ExactSum]:
    return ExactSum(), ExactSum()
