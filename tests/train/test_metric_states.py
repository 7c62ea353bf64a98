"""The states of shards are told without pickle and merged in an order that knows no workers."""

import pytest
import torch

from unisono.plan.samples import SamplePlan
from unisono.training.metrics import MetricState, merged, read_states, write_states

PLAN = SamplePlan(7, 4, shards=3, shuffle=False)  # shard 0: 0 3 │ 6, shard 1: 1 │ 4, shard 2: 2 │ 5


def alone(*numbers, dtype=torch.float32):
    return MetricState([torch.tensor(numbers, dtype=dtype)], False)


def test_what_is_told_is_what_was_held():
    twice = torch.arange(6.0).view(2, 3).t()  # not contiguous, and held by two metrics
    shards = {
        2: {"a": {"sum": alone(1, 2), "rows": MetricState([twice, torch.empty(0, 3)], True)}},
        0: {"a": {"sum": alone(3, 4, dtype=torch.int64), "rows": MetricState([], True)}},
        1: {"b.inner": {"rows": MetricState([twice, torch.tensor(True)], True)}},
    }
    told = {shard: read_states(write_states(states)) for shard, states in shards.items()}
    assert told.keys() == shards.keys()
    for shard, states in shards.items():
        for path, of_metric in states.items():
            for name, state in of_metric.items():
                found = told[shard][path][name]
                assert found.is_list == state.is_list
                assert len(found.tensors) == len(state.tensors)
                for one, other in zip(found.tensors, state.tensors, strict=True):
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other)


def test_nothing_can_be_told():
    assert read_states(write_states({})) == {}


@pytest.mark.parametrize(
    ("reduction", "states", "expected"),
    [
        ("sum", [alone(1e8), alone(1), alone(-1e8)], [0.0]),  # (0 + 1) + 2
        ("sum", [alone(2, dtype=torch.int64)] * 3, [6]),
        ("mean", [alone(1), alone(2), alone(3)], [(3 * 1 + 2 * 2 + 2 * 3) / 7]),
        ("mean", [alone(0.1)] * 3, [torch.tensor(0.1).item()]),
        (None, [alone(1, 2), alone(3, 4), alone(5, 6)], [[1, 2], [3, 4], [5, 6]]),
        (lambda stacked: stacked.max(0).values, [alone(1, 9), alone(3, 4), alone(5, 6)], [5, 9]),
    ],
)
def test_tensors_are_merged_in_shard_order(reduction, states, expected):
    shards = {shard: {"x": states[shard]} for shard in (2, 0, 1)}
    whole = merged(shards, {"x": reduction}, PLAN)["x"]
    assert whole.dtype == states[0].tensors[0].dtype
    assert torch.equal(whole, torch.tensor(expected, dtype=whole.dtype))


def test_sums_are_taken_along_the_tree():
    plan = SamplePlan(4, 4, shards=4, shuffle=False)
    states = {shard: {"x": alone(value)} for shard, value in enumerate([1, 1e8, -1e8, 1])}
    assert merged(states, {"x": "sum"}, plan)["x"].item() == 0  # one by one it would be 1


def test_of_one_shard_alone_nothing_is_stacked():
    plan = SamplePlan(1, 3, shards=3, shuffle=False)
    assert merged({0: {"x": alone(1, 2)}}, {"x": None}, plan)["x"].tolist() == [1, 2]


LISTS = {
    shard: {"x": MetricState([torch.tensor(entry) for entry in entries], True)}
    for shard, entries in {2: [[2], [5]], 0: [[0, 3], [6]], 1: [[1], [4], [4]]}.items()
}


@pytest.mark.parametrize("reduction", ["cat", None])
def test_lists_come_one_shard_after_the_other(reduction):
    found = merged(LISTS, {"x": reduction}, PLAN)["x"]
    assert [entry.tolist() for entry in found] == [[0, 3], [6], [1], [4], [4], [2], [5]]


def test_a_function_of_a_list_is_given_the_list():
    found = merged(LISTS, {"x": lambda entries: torch.cat(entries).sum()}, PLAN)
    assert found["x"].item() == 25
