"""The reduction of one vector per rank: the tree's bits, wherever the result goes."""

import pytest
import torch

from unisono.c10d import reduction
from unisono.plan.summation import tree_sum


@pytest.mark.parametrize("numel", [1, 1000])
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_the_result_may_go_where_any_of_the_values_is(monkeypatch, num_ranks, numel):
    monkeypatch.setattr(reduction, "_BLOCK_BYTES", 256)  # several blocks
    generator = torch.Generator().manual_seed(num_ranks)
    values = [torch.randn(numel, generator=generator) for _ in range(num_ranks)]
    expected = tree_sum(values, torch.add)
    for place in range(num_ranks):
        given = [value.clone() for value in values]
        reduction.combine("SUM", given, given[place])
        assert torch.equal(given[place], expected)
        given = [value.clone() for value in values]
        same_memory = given[place][:]  # another object, as a part of an input may be an output
        reduction.combine("SUM", given, same_memory)
        assert torch.equal(same_memory, expected)
        others = [rank for rank in range(num_ranks) if rank != place]
        assert all(torch.equal(given[rank], values[rank]) for rank in others)
    out = torch.empty(numel)
    reduction.combine("AVG", values, out)
    assert torch.equal(out, expected / num_ranks)
