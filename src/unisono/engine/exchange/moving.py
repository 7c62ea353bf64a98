"""Parameters without an optimizer that passes change, treated like buffers.

An example is MoCo's key encoder, which the forward pass moves toward the trained one. Each shard
starts from the step's first values, and the values that the first shard with samples leaves are
kept. The first steps of a loop show which parameters move; later a shard only compares versions of
the others, and nothing is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, final
from weakref import WeakMethod

import torch
from torch import nn

from unisono.engine.exchange.arena import Arena

VERSION = operator.attrgetter("_version")
_LOOKED_AT_FIRST, _LOOKED_EVERY = 2, 64  # steps

Tensors = Sequence[torch.Tensor]
Values = TypeVar("Values")


@final
class Moving:
    """The parameters of one loop that have no optimizer and that passes move.

    Args:
        fixed: the parameters without an optimizer, by name, in their final memory.
        origin: a method that returns their values, in memory that passes do not change.
        suspects: a method that returns the positions of those that may have changed since the
            loop began. Only weak references to both methods are kept.

    Attributes:
        is_kept_here: whether this worker has published parameters that moved in this step.
    """

    def __init__(
        self,
        fixed: Mapping[str, nn.Parameter],
        arena: Arena,
        origin: Callable[[], Tensors],
        suspects: Callable[[], Sequence[int]],
    ) -> None:
        self._names, self._fixed = list(fixed), list(fixed.values())
        self._shared = [parameter.data for parameter in self._fixed]
        self._origin_now, self._suspects = WeakMethod(origin), WeakMethod(suspects)
        self._regions, self._flags = arena.moved, arena.moved_flags
        self._starts: dict[int, torch.Tensor] = {}  # of those that move
        self._origin: Tensors = ()
        self._sums: dict[int, float] = {}  # before a pass, where that is compared
        self._seen = self._now()
        self._step, self._num_steps = -1, 0
        self._is_noted = self.is_kept_here = self._is_done = False

    def begin(self, step: int) -> None:
        """Start an update of a step; the next shard records the values to start from."""
        self._is_noted = self.is_kept_here = self._is_done = False
        if step != self._step:
            self._step, self._num_steps = step, self._num_steps + 1

    def restore(self) -> None:
        """Start a shard: reset the parameters to the values that the update began with."""
        if self._is_noted:
            self._look()
            self._put_back()
        else:
            self._is_noted = True
            for index, start in self._starts.items():
                start.copy_(self._shared[index])
            is_early = self._num_steps <= _LOOKED_AT_FIRST
            self._origin = _called(self._origin_now) if is_early else ()
            self._sums = {}
            if not is_early and self._step % _LOOKED_EVERY == 0:
                still = {*_called(self._suspects)} - self._starts.keys()
                self._sums = {index: self._sum(index) for index in still}
        self._seen = self._now()

    def _look(self) -> None:
        """Find the parameters that passes have moved, in place or by replacing ``.data``.

        The start value of a parameter that did not move in the first steps is unknown.
        """
        now, moved = self._now(), set[int]()
        if now != self._seen:
            pairs = zip(now, self._seen, strict=True)
            changed = [n for n, (here, before) in enumerate(pairs) if here != before]
            moved = {n % len(self._fixed) for n in changed}
            for index in moved:
                replace_data(self._names[index], self._fixed[index], self._shared[index])
            self._seen = self._now()
        if self._origin:
            still = {*_called(self._suspects)} - self._starts.keys()
            moved |= {index for index in still if not self._is_as_before(index)}
        for index, before in self._sums.items():
            if self._sum(index) != before:
                moved.add(index)
        self._sums = {}  # once a step
        for index in moved - self._starts.keys():
            if not self._origin:
                raise RuntimeError(
                    f"what passes change of parameters without an optimizer must change from the "
                    f"first step of a loop, but `{self._names[index]}` was first seen to change "
                    f"in step {self._step}: change it between two steps, or make it a buffer "
                    f"(`register_buffer`)."
                )
            place = self._shared[index]
            self._starts[index] = torch.empty_like(place).copy_(self._origin[index])

    def keep(self, copy: int) -> None:
        """Publish the values that the first non-empty shard left, in one of the arena's copies."""
        self._look()
        self._flags[copy][:] = bytes(len(self._fixed) + 1)
        for index in self._starts:
            self._regions[copy].tensor(index).copy_(self._shared[index])
            self._flags[copy][index] = 1
            self.is_kept_here = True

    def commit(self, copy: int) -> None:
        """Finish the passes of an update: set the parameters to the published values."""
        if self._is_done:
            return
        if self._is_noted:
            self._look()
            self._put_back()
        self._is_done, self._origin = True, ()
        flags = bytes(self._flags[copy])[:-1]
        for index, is_kept in enumerate(flags):
            if is_kept:
                place = self._shared[index]
                place.copy_(self._regions[copy].tensor(index))
                self._starts.setdefault(index, torch.empty_like(place))

    def drop(self) -> None:
        """Discard what passes have left here, because the values to keep are known already."""
        self._is_done = True
        for parameter, place in zip(self._fixed, self._shared, strict=True):
            parameter.data = place

    def flags(self, copy: int) -> memoryview:
        """View which parameters a copy contains, one byte each; see :class:`Arena`."""
        return self._flags[copy]

    def bytes_kept(self, copy: int) -> list[tuple[int, int]]:
        """Return the spans (start, stop) of the arena in which a copy has values."""
        region = self._regions[copy]
        slots = zip(region.slots, bytes(self._flags[copy]), strict=False)
        return [(region.start + one.offset, region.start + one.end) for one, kept in slots if kept]

    def _now(self) -> list[int]:
        return [*map(VERSION, self._fixed), *map(torch.Tensor.data_ptr, self._fixed)]

    def _is_as_before(self, index: int) -> bool:
        here = self._shared[index]
        return torch.equal(here, self._origin[index].to(here.device))

    def _sum(self, index: int) -> float:
        # A sign that something has changed, which takes no memory.
        return float(torch.sum(self._shared[index].detach(), dtype=torch.float64))

    def _put_back(self) -> None:
        for index, start in self._starts.items():
            self._shared[index].copy_(start)


def _called(method: WeakMethod[Callable[[], Values]]) -> Values:
    alive = method()
    assert alive is not None
    return alive()


def replace_data(
    name: str, tensor: torch.Tensor, place: torch.Tensor, kind: str = "parameter"
) -> None:
    """Copy a tensor's replaced ``.data`` into its own memory, and use that again."""
    if tensor.data_ptr() == place.data_ptr():
        return
    if tensor.shape != place.shape or tensor.dtype != place.dtype:
        raise ValueError(
            f"a {kind} must keep its shape and dtype while a loop is under way, but "
            f"`{name}` was {tuple(place.shape)} of {place.dtype} and is "
            f"{tuple(tensor.shape)} of {tensor.dtype}: change it between two loops."
        )
    place.copy_(tensor.data)
    tensor.data = place
