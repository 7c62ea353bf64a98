"""Where the tensors of one loop lie, for all parts of an exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.exchange.arena import Bytes, Span, private_bytes, size_of, spans_of, within
from unisono.engine.exchange.buffers import Buffers
from unisono.engine.exchange.division import Division
from unisono.engine.exchange.moving import replace_data
from unisono.engine.exchange.references import References
from unisono.engine.exchange.snapshots import RunMemory
from unisono.engine.state.contents import named_parameters, updated_parameters
from unisono.plan.shards import Piece, cut
from unisono.runtime.device import Device
from unisono.runtime.workers.team import Team


@final
class LoopLayout:
    """The tensors of one loop, and the memory that the workers of a host share.

    Attributes:
        updated, fixed: parameters that the optimizer updates, and those that it does not, by name
            and in the same order on every worker.
        parameters: the values of `updated`.
        all: all parameters; `names` are their names.
        memory: what the workers of this host share; the exchange sets it.
        division: which worker computes which shards; the exchange sets it.
        bound: where `all` lie while the loop runs; see :meth:`note_places`.
    """

    memory: RunMemory
    division: Division

    def __init__(self, model: nn.Module, optimizer: Optimizer, team: Team, device: Device) -> None:
        self.model, self.optimizer, self.team = model, optimizer, team
        self.device, self.copies = device, device.copies()
        self.updated = updated_parameters(model, optimizer)
        named = named_parameters(model, optimizer)
        self.fixed = {name: named[name] for name in named if name not in self.updated}
        self.parameters = list(self.updated.values())
        self.names = [*self.updated, *self.fixed]
        self.all = [*self.parameters, *self.fixed.values()]
        self.references = References(self.all, model.buffers())
        self.buffers = Buffers(model, device, self.copies)
        self._pinned: dict[int, Callable[[], None] | None] = {}

    @functools.cached_property
    def num_bytes(self) -> int:
        """The size of a part in bytes."""
        return size_of(self.memory.arena.plan.parameters)

    @functools.cached_property
    def spans(self) -> list[Span]:
        """Which bytes of a part belong to which device."""
        return spans_of(self.memory.arena.plan.parameters, self.parameters)

    @property
    def share(self) -> tuple[int, int]:
        """The position of this worker among those of its host, and their number."""
        here = self.team.neighbours
        return here.index(self.team.world.rank), len(here)

    @functools.cached_property
    def whole_pieces(self) -> list[Piece]:
        """Each parameter that the optimizer updates, as one piece."""
        return [Piece(index, 0, p.numel()) for index, p in enumerate(self.parameters)]

    def cut(self, num_workers: int) -> list[list[Piece]]:
        """Divide the parameters among `num_workers` workers."""
        return cut([parameter.numel() for parameter in self.parameters], num_workers)

    def allocate(self) -> Bytes:
        """Allocate memory of the size of a part where the parameters are, for this worker alone."""
        return private_bytes(
            self.num_bytes, self.device, self.spans if self.device.is_divided else ()
        )

    def within(
        self, there: torch.Tensor, here: Bytes, start: int, stop: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield bytes of the host's memory and the same bytes of this worker's, for each device.

        `there` and `here` are laid out as a part is; `start` and `stop` count its bytes.
        """
        for first, last, _ in within(self.spans, start, stop):
            yield there[first:last], here.flat(first, last - first, torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        """Pin memory of the host until :meth:`unpin`, unless it is pinned."""
        if memory.data_ptr() not in self._pinned:
            self._pinned[memory.data_ptr()] = self.device.register(memory)

    def unpin(self) -> None:
        """Undo every :meth:`pin`."""
        for undo in self._pinned.values():
            if undo is not None:
                undo()

    def note_places(self) -> None:
        """Record where the parameters lie from now on."""
        self.bound = [parameter.data for parameter in self.all]
        self._addresses = list(map(torch.Tensor.data_ptr, self.bound))

    def take_replaced(self) -> None:
        """Copy values from replaced ``.data``, and from memory that the program refers to.

        Raises:
            ValueError: the shape or dtype of a parameter's ``.data`` has changed.
        """
        self.references.take()
        if list(map(torch.Tensor.data_ptr, self.all)) == self._addresses:
            return
        for name, parameter, place in zip(self.names, self.all, self.bound, strict=True):
            replace_data(name, parameter, place)
