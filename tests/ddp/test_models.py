"""Ranks whose models differ are all told, in words that name both."""

import inspect

import pytest
import torch
import torch.nn as nn

import unisono
from unisono.distributed.module import describe, difference
from unisono.errors import MismatchError


def lines(*layers):
    model = nn.Sequential(*layers)
    return describe([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            [nn.Linear(2, 3), nn.Linear(3, 1)],
            [nn.Linear(2, 3)],
            "number 2 of its parameters and buffers is `1.weight: float32 (1, 3)` on rank 4 and "
            "`nothing` on rank 6 (4 and 2 in all)",
        ),
        (
            [nn.Linear(2, 3)],
            [nn.Linear(2, 3).requires_grad_(False)],
            "on rank 4 and `0.weight: float32 (3, 2), takes no gradient` on rank 6",
        ),
    ],
)
def test_the_first_difference_is_named_with_both_ranks(one, other, words):
    models = [lines(*one), lines(*one), lines(*other)]
    assert words in difference(models, [4, 5, 6])


SLOW = pytest.mark.slow
# New in torch 2.13.
NAMES_FORWARD_SYNC = "forward_sync_buffers" in str(
    inspect.signature(nn.parallel.DistributedDataParallel.__init__)
)
DIFFERENCES = {
    "shape": lambda rank: nn.Linear(4, 2 + (rank == 1)),
    "number": lambda rank: nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + (rank == 1)))),
    "dtype": lambda rank: nn.Linear(4, 2, dtype=torch.float64 if rank == 1 else torch.float32),
    "buffer": lambda rank: nn.Sequential(
        nn.Linear(4, 2), nn.BatchNorm1d(2 + (rank == 1), affine=False)
    ),
}


WAYS = [(name, {}) for name in DIFFERENCES]
# Buffers are shared at first whatever is said of forward passes.
WAYS += [("buffer", {"forward_sync_buffers": False})] if NAMES_FORWARD_SYNC else []


def build_each():
    told = {}
    for name, options in WAYS:
        with pytest.raises(MismatchError) as caught:
            unisono.distributed.DistributedDataParallel(
                DIFFERENCES[name](unisono.world().rank), **options
            )
        assert "its parameters and buffers" in str(caught.value)
        told[(name, *options)] = str(caught.value)
    unisono.distributed.DistributedDataParallel(nn.Linear(3, 3))  # and the group lives on
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("unisono", 2), pytest.param("unisono", 3, marks=SLOW), pytest.param("gloo", 3, marks=SLOW)],
)
def test_all_ranks_are_told_the_same(on_ranks, backend, world_size):
    first, *others = on_ranks(backend, world_size, build_each)
    assert all(other == first for other in others)
    for message in first.values():
        assert "on rank 0" in message
        assert "on rank 1" in message


def name_layers_by_rank():
    model = nn.Module()
    model.add_module(f"layer_of_rank_{unisono.world().rank}", nn.Linear(3, 3))
    unisono.distributed.DistributedDataParallel(model)


@SLOW
def test_names_may_differ(on_ranks):
    on_ranks("unisono", 2, name_layers_by_rank)


def skip_the_comparison():
    with torch.no_grad():
        model = nn.Linear(3, 2 + unisono.world().rank)
    unisono.distributed.DistributedDataParallel(model, init_sync=False)


@SLOW
def test_nothing_is_exchanged_without_init_sync(on_ranks):
    on_ranks("unisono", 2, skip_the_comparison)
