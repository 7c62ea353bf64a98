"""The sum of published parts is that of the definition, whoever has gradients for what."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.definition import sum_by_definition

from unisono.engine.exchange.parts import OrderedSum
from unisono.plan.shards import Piece, assign
from unisono.plan.summation import parts_of

NUMELS = (3, 1, 5)


class Published:
    """Parts as an exchange publishes them, in ordinary tensors."""

    def __init__(self, gradients):
        self.gradients = gradients  # by first shard: a tensor or None for each parameter

    def flags(self, lo):
        return b"\0" + bytes(gradient is not None for gradient in self.gradients[lo])

    def views(self, lo, pieces):
        slots = [
            torch.full((numel,), torch.nan) if gradient is None else gradient
            for numel, gradient in zip(NUMELS, self.gradients[lo], strict=True)
        ]
        return [slots[piece.index][piece.start : piece.stop] for piece in pieces]


def add(left, right):
    return right if left is None else left if right is None else left + right


@st.composite
def placements(draw):
    shards = draw(st.integers(1, 12))
    parts = [
        p for mine in assign(shards, draw(st.integers(1, shards))) for p in parts_of(mine, shards)
    ]
    has = draw(st.lists(st.booleans(), min_size=3 * shards, max_size=3 * shards))
    return shards, draw(st.permutations(parts)), has


@pytest.mark.parametrize("in_place", [True, False])
@given(case=placements())
def test_pieces_are_added_as_defined(case, in_place):
    shards, parts, has = case
    generator = torch.Generator().manual_seed(shards)
    by_shard = [
        [
            torch.randn(numel, generator=generator) * (shard % 3 - 1)
            if has[3 * shard + n]
            else None
            for n, numel in enumerate(NUMELS)
        ]
        for shard in range(shards)
    ]
    of_parts = {
        part.lo: [
            sum_by_definition([by_shard[shard][n] for shard in range(part.lo, part.hi)], add)
            for n in range(3)
        ]
        for part in parts
    }
    expected = [sum_by_definition([row[n] for row in by_shard], add) for n in range(3)]
    before = {lo: [g if g is None else g.clone() for g in row] for lo, row in of_parts.items()}
    copies = {lo: [g if g is None else g.clone() for g in row] for lo, row in of_parts.items()}
    pieces = [Piece(0, 0, 3), Piece(2, 0, 2), Piece(2, 2, 5), Piece(1, 0, 1)]
    into = None if in_place else [torch.empty(piece.stop - piece.start) for piece in pieces]
    summed = OrderedSum(Published(copies), parts, pieces, into)
    assert summed.add() == tuple(one is not None for one in expected)
    for piece, total in zip(pieces, summed.totals, strict=True):
        wanted = expected[piece.index]
        if wanted is not None:
            wanted = wanted[piece.start : piece.stop]
            assert torch.equal(total.view(torch.int32), wanted.view(torch.int32))
    if not in_place:
        for lo, row in before.items():
            for one, other in zip(row, copies[lo], strict=True):
                assert one is other is None or torch.equal(one, other)
