"""The order of summation: one fixed binary tree over the shards, whichever worker computes them.

The sum over shards *lo* … *hi* − 1 is defined as ``T[lo,hi) = T[lo,mid) + T[mid,hi)`` with
``mid = lo +`` the largest power of two below ``hi − lo``::

    S = 6          T[0,6)
                 ┌────┴────┐
              T[0,4)     T[4,6)
             ┌──┴──┐     ┌─┴─┐
          T[0,2) T[2,4)  4   5
           ┌┴┐    ┌┴┐
           0 1    2 3

A worker adds up the maximal sub-trees inside its range (its *parts*); then the tree is finished
from all parts. Every placement evaluates the same additions, so the bits agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """The sum of shards `lo` … `hi` − 1; always a node of the tree."""

    lo: int
    hi: int

    def children(self) -> tuple[Node, Node]:
        """Return the two nodes whose sum this one is."""
        mid = self.lo + (1 << ((self.hi - self.lo - 1).bit_length() - 1))
        return Node(self.lo, mid), Node(mid, self.hi)


def parts_of(shards: range, num_shards: int) -> list[Node]:
    """Return the maximal sub-trees inside a range of shards, from left to right."""

    def inside(node: Node) -> list[Node]:
        if node.hi <= shards.start or shards.stop <= node.lo:
            return []
        if shards.start <= node.lo and node.hi <= shards.stop:
            return [node]
        left, right = node.children()
        return inside(left) + inside(right)

    return inside(Node(0, num_shards))


def within(part: Node, others: Sequence[Node]) -> list[Node]:
    """Return those of some sub-trees that are within one, from left to right."""
    return sorted(other for other in others if part.lo <= other.lo and other.hi <= part.hi)


def as_whole(part: Node, others: Sequence[Node]) -> list[Node]:
    """Renumber the shards of sub-trees within one as if that were the whole tree."""
    return [Node(other.lo - part.lo, other.hi - part.lo) for other in others]


def additions_after(part: Node) -> list[int]:
    """Return the number of additions after each shard of a part, for a worker that keeps a stack.

    It pushes each shard's value, then replaces the two topmost by their sum so many times; one
    value, the part's, is left at the end.
    """
    num_shards = part.hi - part.lo  # a part's tree is that of as many shards from 0
    counts, last = [0] * num_shards, list(range(num_shards))
    for into, other in additions_over(num_shards):
        last[into] = last[other]
        counts[last[into]] += 1
    return counts


@functools.lru_cache(maxsize=256)
def additions_over(num_shards: int, parts: tuple[Node, ...] = ()) -> tuple[tuple[int, int], ...]:
    """Return the additions that sum one value per part; by default each shard is a part.

    They are pairs (into, other) of positions in `parts`, in any order: value `into` becomes
    `into` + `other`. The last pair's `into` is then the whole sum.
    """
    parts = parts or tuple(Node(shard, shard + 1) for shard in range(num_shards))
    position = {part: at for at, part in enumerate(parts)}
    additions: list[tuple[int, int]] = []

    def finish(node: Node) -> int:
        if node in position:
            return position[node]
        left, right = map(finish, node.children())
        additions.append((left, right))
        return left

    finish(Node(0, num_shards))
    return tuple(additions)


def tree_sum(
    values: Sequence[Value], add: Callable[[Value, Value], Value], parts: Sequence[Node] = ()
) -> Value:
    """Return the sum in canonical order: sums of steps, all_reduce and DDP are computed here.

    One value per shard, or per one of `parts`. `add` may write to the memory of either value.
    """
    sums, into = list(values), 0
    num_shards = max(part.hi for part in parts) if parts else len(sums)
    for into, other in additions_over(num_shards, tuple(parts)):
        sums[into] = add(sums[into], sums[other])
    return sums[into]
