"""Metrics that are plain functions: called once, with the rows of the whole dataset.

::

    metrics={"auc": lambda outputs, targets: roc_auc_score(targets, outputs[:, 1])}

Shards keep what `forward` gives; their rows travel as states of torchmetrics do and come together
in the order of the dataset. The leader calls the functions and tells the others the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.plan.samples import SamplePlan
from unisono.train.failures import heard_by_all
from unisono.train.metric_states import MetricState, States, merged
from unisono.workers.team import Team

RowFunction = Callable[..., Any]
_PATH = "rows"


class RowMetrics:
    """The functions of one evaluation. Final.

    Args:
        functions: by name; each takes the rows of what `forward` gives, as tensors on the host, to
            a number or to lists of numbers.
    """

    def __init__(self, functions: Mapping[str, RowFunction]) -> None:
        self._functions = dict(functions)

    @property
    def facts(self) -> dict[str, str]:
        """What workers must agree on."""
        return {
            name: str(getattr(function, "__qualname__", type(function).__name__))
            for name, function in self._functions.items()
        }

    def finish(self, shards: Mapping[int, States], plan: SamplePlan, team: Team) -> dict[str, Any]:
        """Call the functions. Collective.

        Args:
            shards: by shard, the states of those that have samples.
            plan: of the dataset.
            team: the workers.

        Returns:
            By name, a number, or a list where there are several; the same on every worker.

        Raises:
            Exception: what a function has raised on the leader.
        """
        results: dict[str, Any]
        (results,) = heard_by_all(
            lambda speak: [team.hear_leader(speak, "metrics")],
            lambda: self._compute(shards, plan),
            team.world.rank,
        )
        return results

    def _compute(self, shards: Mapping[int, States], plan: SamplePlan) -> dict[str, Any]:
        held = {shard: states[_PATH] for shard, states in shards.items()}
        names = list(next(iter(held.values())))
        rows = {
            name: entries[0]
            for name, entries in merged(held, dict.fromkeys(names, "cat"), plan).items()
        }
        # Positions are numbers, as JSON has them; names come from a dict.
        is_named = not names[0].isdecimal()
        return {
            name: plain(name, function(**rows) if is_named else function(*rows.values()))
            for name, function in self._functions.items()
        }


class ShardRows:
    """The rows of one shard. Final."""

    def __init__(self) -> None:
        self._rows: dict[str, list[torch.Tensor]] = {}

    def add(self, found: Any, num_samples: int) -> None:
        """Keep what `forward` gives for a part.

        Raises:
            TypeError: it is something else than tensors with a row for each sample.
        """
        if not isinstance(found, Mapping):
            parts = found if isinstance(found, (tuple, list)) else (found,)
            found = {str(position): part for position, part in enumerate(parts)}
        for name, part in found.items():
            if not isinstance(part, torch.Tensor) or part.dim() == 0 or len(part) != num_samples:
                seen = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
                raise TypeError(
                    f"`forward` must give tensors with one row for each of the {num_samples} "
                    f"samples for metrics that are functions, but {name!r} is {seen}: give rows, "
                    f"and compute numbers from them in the function."
                )
            self._rows.setdefault(str(name), []).append(part.detach())

    def states(self) -> States:
        """Give what is kept."""
        return {
            _PATH: {
                name: MetricState(parts, list(range(1, len(parts) + 1)))
                for name, parts in self._rows.items()
            }
        }


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
