"""Gradients that are published while a backward pass goes on are those that count in the end."""

import functools
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.engine.step.gradients import GradientStack
from unisono.engine.step.shard_passes import published_early
from unisono.plan.summation import Node

NUM = 5


class Noting:
    """What an exchange is given, as the one that takes it would have it in the end."""

    def __init__(self):
        self.seen = []

    def publish_early(self, part, index, gradient):
        self.seen.append((part, index, gradient.clone()))


def gradient(shard, index):
    if (shard + index) % 3 == 0:
        return None
    generator = torch.Generator().manual_seed(10 * shard + index)
    return torch.randn(4, 3, generator=generator) * 10.0**shard


def parameters():
    return [nn.Parameter(torch.zeros(4, 3)) for _ in range(NUM)]


def leave(there, shard):
    for index, parameter in enumerate(there):
        parameter.grad = gradient(shard, index)


def all_but_the_last(shards):
    """Push all shards but the last, whose gradients are left."""
    there = parameters()
    stack = GradientStack(there, [Node(0, shards)])
    for shard in range(shards):
        leave(there, shard)
        if shard < shards - 1:
            stack.push(shard)
    return there, stack


def same(here, there):
    return (here is None and there is None) or torch.equal(here, there)


@functools.cache
def expected(shards):
    return all_but_the_last(shards)[1].push(shards - 1)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("seed", range(4))
def test_sums_are_the_same_in_whatever_order_gradients_come(shards, seed):
    there, stack = all_but_the_last(shards)
    draw = random.Random(seed)
    seen = {}
    for index in draw.sample(range(NUM), draw.randint(0, NUM)):
        if there[index].grad is not None:
            part, seen[index] = stack.add_early(index, there[index].grad)
            assert part == Node(0, shards)
    part, sums = stack.push(shards - 1)
    assert part == Node(0, shards)
    assert all(map(same, sums, expected(shards)[1]))
    assert all(sums[index] is early for index, early in seen.items())  # need not be copied again


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_a_gradient_that_changes_after_it_was_seen_counts_as_it_is_in_the_end(shards):
    there, stack = all_but_the_last(shards)
    early = {}
    for index, parameter in enumerate(there):
        if parameter.grad is not None:
            wrong = parameter.grad = parameter.grad + 1
            total = stack.add_early(index, wrong)[1]
            early[index] = total, total._version
            if index % 2:
                parameter.grad = wrong - 1
            else:
                wrong.copy_(gradient(shards - 1, index))
    leave_right = [gradient(shards - 1, index) for index in range(NUM)]
    for parameter, right in zip(there, leave_right, strict=True):
        if right is not None and not torch.equal(parameter.grad, right):
            parameter.grad = right
    sums = stack.push(shards - 1)[1]
    assert all(map(same, sums, expected(shards)[1]))
    for index, (total, version) in early.items():
        assert (sums[index] is not total) or total._version != version  # is to be copied again


def test_an_earlier_attempt_leaves_nothing_behind():
    there, stack = all_but_the_last(2)
    for index, parameter in enumerate(there):
        if parameter.grad is not None:
            stack.add_early(index, parameter.grad)
            parameter.grad = None  # the pass has failed, and the program takes it again
    leave(there, 1)
    assert all(map(same, stack.push(1)[1], expected(2)[1]))


def doubled(parameter):
    parameter.grad.mul_(2)


def test_hooks_of_the_program_come_first_and_ours_are_gone_afterwards():
    layer = nn.Linear(3, 2)
    there, exchange = list(layer.parameters()), Noting()
    stack = GradientStack(there, [Node(0, 1)])
    layer.weight.register_post_accumulate_grad_hook(doubled)
    for _ in range(2):
        with published_early(there, stack, exchange):
            layer.bias.register_post_accumulate_grad_hook(lambda p: None)
            layer(torch.ones(1, 3)).sum().backward()
        sums = stack.push(0)[1]
        assert {index for _, index, _ in exchange.seen} == {0, 1}
        for _, index, seen in exchange.seen:
            assert torch.equal(seen, sums[index])
        exchange.seen.clear()
    layer(torch.ones(1, 3)).sum().backward()
    assert not exchange.seen


def test_a_parameter_that_two_segments_recompute_comes_twice():
    layer = nn.Linear(3, 3)
    there, exchange = list(layer.parameters()), Noting()
    stack = GradientStack(there, [Node(0, 1)])

    def loss():
        values = torch.ones(1, 3, requires_grad=True)
        for _ in range(2):
            values = checkpoint(layer, values, use_reentrant=True)
        return values.sum()

    loss().backward()
    right = [p.grad for p in there]
    layer.zero_grad()
    with published_early(there, stack, exchange):
        loss().backward()
    assert len(exchange.seen) == 4
    sums = stack.push(0)[1]
    assert all(map(torch.equal, sums, right))
    last = {index: seen for _, index, seen in exchange.seen}
    assert all(torch.equal(last[index], right[index]) for index in (0, 1))


def test_an_error_in_the_backward_pass_takes_the_hooks_away():
    layer, exchange = nn.Linear(3, 2), Noting()
    there = list(layer.parameters())
    stack = GradientStack(there, [Node(0, 1)])
    with pytest.raises(ZeroDivisionError), published_early(there, stack, exchange):
        raise ZeroDivisionError
    layer(torch.ones(1, 3)).sum().backward()
    assert not exchange.seen


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("places", ["aa", "ab a", "abba"])
def test_gradients_that_reuse_memory_are_refused(places, early):
    there = [nn.Parameter(torch.zeros(4, 3))]
    memory = {place: torch.zeros(12) for place in "ab"}
    stack = GradientStack(there, [Node(0, len(places))])

    def push(shard, place):
        if place == " ":
            there[0].grad = None
        else:
            there[0].grad = memory[place].fill_(shard + 1).view(4, 3)  # another object each time
            if early and shard == stack.last_shard:
                stack.add_early(0, there[0].grad)
        stack.push(shard)

    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) overwrites that of an earlier"):
        for shard, place in enumerate(places):
            push(shard, place)


def test_empty_gradients_have_no_memory_in_common():
    there = [nn.Parameter(torch.zeros(0, 3))]
    stack = GradientStack(there, [Node(0, 2)])
    for shard in range(2):
        there[0].grad = torch.zeros(0, 3)
        stack.push(shard)
