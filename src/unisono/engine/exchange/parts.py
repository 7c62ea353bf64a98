"""Published parts in host memory, each in the slot of its first shard.

A parameter that got no gradient from any shard of a part adds nothing to the sum: a byte a
parameter says which have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from unisono.engine.exchange.arena import Block, Bytes, Region, Slot, Span, private_bytes
from unisono.plan.shards import Piece
from unisono.plan.summation import Node, additions_over, as_whole, tree_sum
from unisono.runtime.device import Device, by_device

Gradients = Sequence["torch.Tensor | None"]

_PRESENT, _ABSENT = 1, 0


@final
class OwnParts:
    """The parts that this worker has computed, by first shard, in private memory.

    Args:
        slots: where each parameter lies in a part.
        spans: on several devices, where which bytes are.
    """

    def __init__(
        self, slots: Sequence[Slot], num_bytes: int, device: Device, spans: Sequence[Span] = ()
    ) -> None:
        self._slots = slots
        self._num_bytes, self._device, self._spans = num_bytes, device, spans
        self._memories: dict[int, Bytes] = {}

    def __getitem__(self, lo: int) -> Region:
        return Region(self.memory(lo), 0, self._slots)

    @property
    def blocks(self) -> list[Block]:
        """The blocks of device memory that the parts use."""
        return [memory for memory in self._memories.values() if isinstance(memory, Block)]

    def memory(self, lo: int) -> Bytes:
        """Return the memory of a part, given its first shard."""
        if lo not in self._memories:
            self._memories[lo] = private_bytes(self._num_bytes, self._device, self._spans)
        return self._memories[lo]


class PublishedParts(NamedTuple):
    """Parts that can be added up; together they are every shard, or all of a sub-tree, once."""

    nodes: Sequence[Node]
    rows: Sequence[Sequence[memoryview]]  # the flags of each; see `presence`
    regions: Sequence[Region]  # where each is, or where it would be of which only pieces are there


@final
class Parts:
    """Writes and reads published parts.

    Args:
        flags: per shard, which parameters its part has gradients for; all see them.
        regions: where parts lie: in an arena, or in memory of this worker alone.
    """

    def __init__(self, flags: Sequence[memoryview], regions: Sequence[Region] | OwnParts) -> None:
        self._flags, self._regions = flags, regions
        self._slots: dict[int, list[torch.Tensor]] = {}
        self._is_divided = False

    def publish(self, part: Node, gradients: Gradients) -> None:
        """Copy a part into its slot.

        Raises:
            TypeError: a gradient is sparse.
        """
        slots = self._slots_of(part)
        present = [g for g in gradients if g is not None]
        if len(present) == len(slots):
            self._flags[part.lo][0] = _PRESENT
        else:
            flags = (_ABSENT, *(_ABSENT if g is None else _PRESENT for g in gradients))
            self._flags[part.lo][:] = bytes(flags)
            slots = [slot for slot, g in zip(slots, gradients, strict=True) if g is not None]
        if present:
            with torch.no_grad():
                _check_dense(slots, present)
                if self._is_divided:
                    for into, source in by_device(slots, present):
                        torch._foreach_copy_(into, source)
                else:
                    torch._foreach_copy_(slots, present)

    def begin(self, part: Node) -> None:
        """Start to publish a part one parameter at a time, without gradients so far."""
        self._flags[part.lo][:] = bytes(len(self._flags[part.lo]))

    def put(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """Copy the gradient of one parameter into a part's slot, once the part is begun."""
        with torch.no_grad():
            slots = [self._slots_of(part)[index]]
            _check_dense(slots, [gradient])
            torch._foreach_copy_(slots, [gradient])
        self._flags[part.lo][1 + index] = _PRESENT

    def remove(self, part: Node, index: int) -> None:
        """Remove the gradient of one parameter from a part."""
        self._flags[part.lo][1 + index] = _ABSENT

    def published(self, nodes: Sequence[Node]) -> PublishedParts:
        """Return parts to be added up."""
        rows = [(self._flags[node.lo],) for node in nodes]
        return PublishedParts(nodes, rows, [self._regions[node.lo] for node in nodes])

    def _slots_of(self, part: Node) -> list[torch.Tensor]:
        slots = self._slots.get(part.lo)
        if slots is None:
            slots = self._slots[part.lo] = self._regions[part.lo].tensors()
            self._is_divided = len({slot.device for slot in slots if slot.numel()}) > 1
        return slots


def presence(flags: bytes) -> list[bool]:
    """Return, for each parameter, whether a part has a gradient for it.

    Args:
        flags: a byte that is 1 where all have one, then a byte for each parameter.
    """
    is_complete, *each = flags
    return [bool(is_complete or flag) for flag in each]


def pieces_within(slots: Sequence[Slot], start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces of parameters in bytes `start` … `stop` − 1, whole cache lines."""
    for index, slot in enumerate(slots):
        size = slot.dtype.itemsize
        first = max(start, slot.offset) - slot.offset
        last = min(stop, slot.offset + slot.numel * size) - slot.offset
        if first < last:
            yield Piece(index, first // size, last // size)


def _check_dense(slots: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    for slot, gradient in zip(slots, gradients, strict=True):
        if gradient.layout != torch.strided:
            raise TypeError(
                f"gradients must be dense, but one of shape {tuple(slot.shape)} has layout "
                f"{gradient.layout}: make its layer with `sparse=False`."
            )


_PROGRAMS_AT_MOST = 256
_Vectors = Sequence[torch.Tensor]
_Act = tuple[Callable[..., object], list[torch.Tensor], list[torch.Tensor]]


@final
class OrderedSum:
    """The sum of all parts in tree order, over some pieces of every parameter.

    Args:
        into: where to store the sums, as vectors; then the parts are kept. None: over the parts
            (the whole sum over that of the first shard), whose pieces nobody else reads.

    Attributes:
        pieces: the pieces that are added up.
        totals: the sums of `pieces`, as vectors.
    """

    def __init__(
        self,
        published: PublishedParts,
        pieces: Sequence[Piece],
        into: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._rows, self.pieces = published.rows, pieces
        starts = [node.lo for node in published.nodes]
        whole = Node(min(starts), max(node.hi for node in published.nodes))
        self._parts = tuple(as_whole(whole, published.nodes))
        self._views = [region.pieces(pieces) for region in published.regions]
        first = starts.index(whole.lo)
        written = {first} | {into for into, _ in additions_over(whole.hi - whole.lo, self._parts)}
        self._sums: list[Sequence[torch.Tensor]] = [
            views if into is None or at not in written else list(map(torch.empty_like, views))
            for at, views in enumerate(self._views)
        ]
        if into is not None:
            self._sums[first] = into
        self.totals = self._sums[first]
        self._programs: dict[tuple[bytes, ...], _Program] = {}
        self._flags: tuple[bytes, ...] = ()

    def add(self) -> tuple[bool, ...]:
        """Add up the published parts.

        Returns:
            For each parameter, whether any shard had a gradient for it; only then are its totals
            defined.
        """
        self._flags = flags = tuple(map(b"".join, self._rows))
        program = self._programs.get(flags)
        if program is None:
            if len(self._programs) >= _PROGRAMS_AT_MOST:
                self._programs.clear()
            program = self._programs[flags] = self._compile(flags)
        for act, into, other in program.actions:
            act(into, other)
        return program.present

    def is_outdated(self) -> bool:
        """Return whether the set of gradients has changed since :meth:`add`."""
        now = tuple(map(b"".join, self._rows))
        return now != self._flags and list(map(presence, now)) != list(map(presence, self._flags))

    def _compile(self, flags: tuple[bytes, ...]) -> _Program:
        """Return the additions for one pattern of gradients."""
        actions: list[_Act] = []

        def act(what: Callable[..., object], into: _Vectors, other: _Vectors, on: set[int]) -> None:
            positions = [n for n, piece in enumerate(self.pieces) if piece.index in on]
            some = [[vectors[n] for n in positions] for vectors in (into, other)]
            actions.extend((what, *lists) for lists in by_device(*some))

        def add(one: _Sum, other: _Sum) -> _Sum:
            act(torch._foreach_add_, one.vectors, other.vectors, one.present & other.present)
            act(torch._foreach_copy_, one.vectors, other.vectors, other.present - one.present)
            return _Sum(one.vectors, one.present | other.present)

        values = []
        for views, sums, row in zip(self._views, self._sums, flags, strict=True):
            present = {index for index, there in enumerate(presence(row)) if there}
            if sums is not views:
                act(torch._foreach_copy_, sums, views, present)
            values.append(_Sum(sums, present))
        total = tree_sum(values, add, self._parts)
        is_present = tuple(index in total.present for index in range(len(flags[0]) - 1))
        return _Program(tuple(actions), is_present)


class _Sum(NamedTuple):
    """Where the sum of some shards is, and which parameters any of them had a gradient for."""

    vectors: _Vectors
    present: set[int]


@dataclass(frozen=True, slots=True)
class _Program:
    """The additions of one pattern of gradients: add where both sides have one, else take over."""

    actions: tuple[_Act, ...]
    present: tuple[bool, ...]
