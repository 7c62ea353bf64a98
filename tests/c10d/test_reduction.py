"""The reduction of one vector per rank, wherever it goes; and what a rank posts about a call."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.definition import sum_by_definition

from unisono.runtime.c10d import collectives as reduction
from unisono.runtime.c10d.calls import encode
from unisono.runtime.c10d.group_memory import POST_TEXT_BYTES


@pytest.mark.parametrize("numel", [1, 1000])
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_the_result_may_go_where_any_of_the_values_is(monkeypatch, num_ranks, numel):
    monkeypatch.setattr(reduction, "_BLOCK_BYTES", 256)  # several blocks
    generator = torch.Generator().manual_seed(num_ranks)
    values = [torch.randn(numel, generator=generator) for _ in range(num_ranks)]
    expected = sum_by_definition(values, torch.add)
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


OPERATIONS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BXOR": torch.bitwise_xor,
}


@pytest.mark.slow
@given(st.integers(1, 20), st.sampled_from(sorted(OPERATIONS)), st.integers(-1, 19))
def test_every_reduction_is_that_of_the_definition(num_ranks, name, place):
    dtype = torch.int32 if name == "BXOR" else torch.float32
    generator = torch.Generator().manual_seed(num_ranks)
    values = (torch.randn(num_ranks, 7, generator=generator) * 9).to(dtype)
    values[:, 0] = 0  # and of one sign: -0.0 stays what it is
    if dtype.is_floating_point:
        values[:, 0].neg_()
    given_values = values.clone().unbind()
    out = given_values[place][:] if -1 < place < num_ranks else torch.empty(7, dtype=dtype)
    reduction.combine(name, given_values, out)
    expected = sum_by_definition(values.unbind(), OPERATIONS[name])
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint64])
def test_averages_that_mean_nothing_or_that_torch_cannot_add_up_are_refused(dtype):
    with pytest.raises(TypeError, match="AVG"):
        reduction.check("AVG", dtype)


F32 = torch.float32


def test_calls_that_differ_in_shape_or_sizes_have_other_bytes():
    calls = {
        encode("broadcast", F32, 6, root=0, shape=shape) for shape in [(6,), (2, 3), (3, 2), (1, 6)]
    } | {encode("all_to_all", F32, sizes=sizes) for sizes in [(2, 3), (3, 2), (1, 4)]}
    assert len(calls) == 7


def test_a_call_of_many_words_is_cut_and_still_differs_from_others():
    shapes = [(1,) * 99 + (size,) for size in (2, 3)]
    calls = {encode("broadcast", F32, 6, root=0, shape=shape) for shape in shapes}
    assert len(calls) == 2
    for call in calls:
        assert len(call) == POST_TEXT_BYTES
        assert call.decode(errors="replace").startswith("broadcast of 6 float32 elements in the")
