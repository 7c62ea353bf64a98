"""What a step makes of a buffer that its shards have changed."""

import pytest
import torch
from torch import nn

from unisono.engine.step.combined_buffers import combined, ways_of

START = torch.tensor([1.0, 10.0])
LEFT = {0: torch.tensor([3.0, 4.0]), 2: torch.tensor([2.0, 20.0]), 3: torch.tensor([7.0, 10.0])}
SIZES = (2, 0, 1, 1)


@pytest.mark.parametrize(
    ("way", "expected"),
    [("sum", [10.0, 14.0]), ("mean", [3.75, 9.5]), ("max", [7.0, 20.0]), ("min", [2.0, 4.0])],
)
def test_shards_without_samples_do_not_count(way, expected):
    assert combined(way, START, LEFT, SIZES).tolist() == expected


@pytest.mark.parametrize("way", ["sum", "mean", "max", "min"])
def test_what_one_shard_leaves_has_its_bits(way):
    left = torch.rand(5)
    assert torch.equal(combined(way, torch.rand(5), {1: left}, (0, 3)), left)


def test_sums_are_in_the_order_of_the_tree_and_in_the_buffers_dtype():
    start = torch.tensor(0.0, dtype=torch.bfloat16)
    parts = [torch.tensor(x, dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0, 1.0, 1.0)]
    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    made = combined("sum", start, dict(enumerate(parts)), (1,) * 5)
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, start + expected)


def test_whole_numbers_and_flags_are_exact():
    left = {0: torch.tensor([1 << 40, 5]), 1: torch.tensor([1, 6])}
    assert combined("sum", torch.tensor([0, 5]), left, (1, 1)).tolist() == [(1 << 40) + 1, 6]
    flags = {0: torch.tensor([True, False]), 1: torch.tensor([False, False])}
    assert combined("max", torch.zeros(2, dtype=torch.bool), flags, (1, 1)).tolist() == [
        True,
        False,
    ]


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))


def test_buffers_are_named_by_patterns():
    model = nn.Sequential(Buffered(), Buffered())
    assert ways_of(model, {"*.count": "sum", "1.mean": "mean"}) == {
        "0.count": "sum",
        "1.count": "sum",
        "1.mean": "mean",
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"weight": "sum"},
            r"must name buffers of the model, .* 'weight' is none of \['count', 'm",
        ),
        ({"mean": "total"}, r"must combine in one of \('first', 'sum', .* is 'total' for 'mean'"),
        ({"count": "mean"}, r'must be "sum", .* torch.int64 for `count`, but is \'mean\''),
        ({"seen": "sum"}, r'must be "max", .* torch.bool for `seen`, but is \'sum\''),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        ways_of(Buffered(), given)
