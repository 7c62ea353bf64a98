"""Parameters that no optimizer of the run updates and that passes move: they live as buffers do.

The key encoder of MoCo, say, which its forward pass moves after the one that is trained. Each shard
starts from what the step began with, and what the first shard with samples leaves is kept. Which
parameters these are is seen in the first steps of a loop; of frozen ones a shard looks at the
versions after that, and nothing is copied.
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
    """Of one loop's parameters without an optimizer, those that move.

    Args:
        fixed: those parameters, by name, with memory that they keep.
        origin: a method that gives what they are now, in memory that passes do not change.
        suspects: a method that says which of them, by position, may have been changed since the
            loop began. Neither is kept alive, as whom they belong to holds this.

    Attributes:
        is_kept_here: whether this worker has kept some that have moved in this step.
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
        """Start an update of a step: the next shard starts from what they are then."""
        self._is_noted = self.is_kept_here = self._is_done = False
        if step != self._step:
            self._step, self._num_steps = step, self._num_steps + 1

    def restore(self) -> None:
        """Start a shard: they are what the update began with."""
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
        """Find those that the passes before have moved, whatever way they take.

        Of one that has not moved in the first steps it is not known what the step began with.
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
        """Publish what the first non-empty shard has left, as one of the arena's copies."""
        self._look()
        self._flags[copy][:] = bytes(len(self._fixed) + 1)
        for index in self._starts:
            self._regions[copy].tensor(index).copy_(self._shared[index])
            self._flags[copy][index] = 1
            self.is_kept_here = True

    def commit(self, copy: int) -> None:
        """Finish the passes of an update: they are those that were kept."""
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
        """Do without what passes have left here, as what is to be kept is known already."""
        self._is_done = True
        for parameter, place in zip(self._fixed, self._shared, strict=True):
            parameter.data = place

    def flags(self, copy: int) -> memoryview:
        """View which parameters a copy has: a byte for each, 1 for those, and see the arena."""
        return self._flags[copy]

    def bytes_kept(self, copy: int) -> list[tuple[int, int]]:
        """Return where a copy has values: bytes (start, stop) of the arena."""
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
    """Take over the ``.data`` that a program has given a tensor, into memory that it keeps."""
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
