"""In which order we add: one fixed binary tree over the shards, whoever computed them.

The sum over shards *lo* … *hi* − 1 is defined as ``T[lo,hi) = T[lo,mid) + T[mid,hi)`` with
``mid = lo +`` the largest power of two below ``hi − lo``::

    S = 6          T[0,6)
                 ┌────┴────┐
              T[0,4)     T[4,6)
             ┌──┴──┐     ┌─┴─┐
          T[0,2) T[2,4)  4   5
           ┌┴┐    ┌┴┐
           0 1    2 3

A worker adds up the maximal sub-trees inside its range (its *parts*); once all parts are there,
the tree is finished. Every placement evaluates the same additions, so the bits agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """The sum of shards `lo` … `hi` − 1; always a node of the tree."""

    lo: int
    hi: int

    @property
    def is_leaf(self) -> bool:
        """Whether this is one shard alone."""
        return self.hi - self.lo == 1

    def children(self) -> tuple[Node, Node]:
        """The two nodes whose sum this one is."""
        mid = self.lo + (1 << ((self.hi - self.lo - 1).bit_length() - 1))
        return Node(self.lo, mid), Node(mid, self.hi)


def parts_of(shards: range, num_shards: int) -> list[Node]:
    """Find the maximal sub-trees inside a range of shards, from left to right.

    Args:
        shards: a worker's contiguous range.
        num_shards: S.
    """

    def inside(node: Node) -> list[Node]:
        if node.hi <= shards.start or shards.stop <= node.lo:
            return []
        if shards.start <= node.lo and node.hi <= shards.stop:
            return [node]
        left, right = node.children()
        return inside(left) + inside(right)

    return inside(Node(0, num_shards))


def additions_after(part: Node) -> list[int]:
    """Count the additions due after each shard of a part, for a worker that keeps a stack.

    It pushes each shard's value, then so often replaces the two topmost by their sum; one value,
    the part's, is left at the end.
    """
    if part.is_leaf:
        return [0]
    left, right = part.children()
    counts = additions_after(left) + additions_after(right)
    counts[-1] += 1
    return counts


def additions_over(parts: Sequence[Node], num_shards: int) -> list[tuple[int, int]]:
    """List the additions that finish the tree once every part is in the slot of its first shard.

    Args:
        parts: the parts of all workers; together they are shards 0 … S − 1.
        num_shards: S.

    Returns:
        Pairs (into, from): slot `into` becomes slot `into` + slot `from`. Slot 0 ends up with
        the whole sum.
    """
    done = set(parts)

    def finish(node: Node) -> list[tuple[int, int]]:
        if node in done:
            return []
        left, right = node.children()
        return [*finish(left), *finish(right), (left.lo, right.lo)]

    return finish(Node(0, num_shards))


def tree_sum(values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Add one value per shard in the canonical order.

    Args:
        values: one per shard, at least one.
        add: the addition.
    """

    def total(node: Node) -> Value:
        if node.is_leaf:
            return values[node.lo]
        left, right = node.children()
        return add(total(left), total(right))

    return total(Node(0, len(values)))
