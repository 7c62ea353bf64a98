"""One worker's stage of a model: which layers are its own, and its passes in their order.

::

    start ─► the program's loss function, in the mode ─► land ─► shards in flight
    the oldest of these ─► differentiate                          (plan/pipeline.py says when)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unisono.device import Device
from unisono.plan.pipeline import limit_of
from unisono.stages.balance import assigned, divide
from unisono.stages.flight import Flight
from unisono.stages.journey import Journey
from unisono.stages.pipe import ReplicaBrokenError, StagePipe
from unisono.stages.stage_mode import StageMode
from unisono.stages.units import units_of
from unisono.workers.team import Team

Balance = str | Mapping[Any, Sequence[str]]
BY_MEMORY = "memory"


class StageWorker:
    """Computes one stage of a model for the shards of a replica. Final; for one loop.

    Args:
        model: the whole one; the same on every worker.
        others: parameters that are not the model's.
        team: the workers.
        device: where this one computes.
        key: names the memory of the pipe.
        balance: see :func:`stages_of_layers`.
        in_flight: how many shards may be in flight; None: as many as there are stages.

    Attributes:
        limit: how many this stage may have in flight.
        busy_s, passes_s: of all steps: the seconds of this stage's passes without the waits within
            them, and with those.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Sequence[nn.Parameter],
        team: Team,
        device: Device,
        *,
        key: int,
        balance: Balance,
        in_flight: int | None,
    ) -> None:
        self._team, self._device = team, device
        self.stage_of, self._units = stages_of_layers(model, team.num_stages, balance)
        # What is not the model's is computed with behind it.
        self.stage_of |= {id(parameter): team.num_stages - 1 for parameter in others}
        self.limit = limit_of(team.stage, team.num_stages, in_flight)
        self._pipe = StagePipe(team, key, limit_of(0, team.num_stages, in_flight))
        buffers = frozenset(map(id, model.buffers()))
        self._journey = Journey(team.stage, self.stage_of, buffers)
        self._mode = StageMode(self._journey, team.stage, device.torch)
        self._hooks = ExitStack()
        self._num_flights = 0
        self._begun_s = self._waited_s = 0.0
        self.busy_s = self.passes_s = 0.0

    def begin(self) -> None:
        """Begin a step. Collective where the membership has changed.

        Raises:
            ReplicaBrokenError: somebody was lost.
        """
        if self._pipe.generation != self._team.membership.generation:
            self._num_flights = 0
            if not self._pipe.restart():
                raise ReplicaBrokenError
        self._begun_s, self._waited_s = time.perf_counter(), self._pipe.waited_s

    def finish(self) -> None:
        """End a step's passes."""
        passed_s = time.perf_counter() - self._begun_s
        self.passes_s += passed_s
        self.busy_s += passed_s - (self._pipe.waited_s - self._waited_s)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the program's operations seen within a block, while shards are under way."""
        try:
            with self._mode:
                yield
        finally:
            self._mode.is_active = False
            self._hooks.close()

    def start(self, shard: int) -> Flight:
        """Begin a shard's forward pass."""
        flight = Flight(self._pipe, self._num_flights, shard, self._device)
        self._num_flights += 1
        for module, stage in self._units:
            enter = functools.partial(self._enter, stage)
            self._hooks.callback(module.register_forward_pre_hook(enter).remove)
        self._mode.begin(flight)
        return flight

    def land(self, returned: Any) -> Any:
        """End it: give what the program returned, on the stage where all of it is; else None."""
        returned = self._mode.end(returned)
        self._hooks.close()
        return returned

    def differentiate(
        self, flight: Flight, roots: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> bool:
        """Make a shard's backward pass; see :meth:`Flight.differentiate`."""
        return flight.differentiate(roots, gradients, self._mode.recomputing(flight))

    @property
    def is_last(self) -> bool:
        """Whether the pass has ended on this stage, which has the loss."""
        return self._journey.is_here

    def publishes(self, buffer: torch.Tensor) -> bool:
        """Tell whether it is on this stage to say what a shard's pass has made of a buffer."""
        holder = self._journey.holder_of(buffer)
        return (self._journey.place if holder is None else holder) == self._team.stage

    def _enter(self, stage: int, module: nn.Module, args: Any) -> Any:
        return self._mode.enter(stage, args)


def stages_of_layers(
    model: nn.Module, num_stages: int, balance: Balance
) -> tuple[dict[int, int], list[tuple[nn.Module, int]]]:
    """Say which layers of a model are on which stage.

    Args:
        model: which.
        num_stages: how many.
        balance: ``"memory"``: the largest stage is as small as it can be; or for each stage, by
            its number, the names of its layers, or of what several layers are within.

    Returns:
        The stage of each parameter, by its id, and modules with theirs.

    Raises:
        TypeError, ValueError: it cannot be cut so.
    """
    units = units_of(model)
    names = [unit.name for unit in units]
    if isinstance(balance, Mapping):
        known: dict[Hashable, int] = {stage: stage for stage in range(num_stages)}
        named: dict[Hashable, Sequence[str]] = {**balance}
        stages = assigned(named, known, names, [bool(unit.parameters) for unit in units])
    elif balance == BY_MEMORY:
        stages = divide([unit.num_bytes for unit in units], names, num_stages)
    else:
        raise ValueError(
            f'`balance` must be "memory" or the names of layers by stage, but is {balance!r}: '
            f'pass `{{0: ["embed"], 1: ["blocks"]}}`, say.'
        )
    of_parameters: dict[int, int] = {}
    modules: list[tuple[nn.Module, int]] = []
    for unit, stage in zip(units, stages, strict=True):
        for parameter in unit.parameters.values():
            of_parameters.setdefault(id(parameter), stage)
        if unit.module is not None:
            modules.append((unit.module, stage))
    return of_parameters, modules
