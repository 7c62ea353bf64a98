"""Buffers that passes count in: in a loop of one's own, and what is refused (row `Counting`)."""

import pytest
import torch
from tests.classified import cross_entropy, taken
from tests.parity.plain_rows import Counting, numbers, trained

import unisono


def test_a_loop_of_ones_own_has_the_values_of_a_trainer():
    row = Counting()
    torch.manual_seed(0)
    model = row.model()
    run = unisono.Run(model, row.optimizer(model), shards=6, buffers=row.ways)
    assert len(list(taken(run, cross_entropy, row.data, steps=7, **row.reading))) == 7
    assert numbers(model) == trained("Counting", 6, 7, None)


def test_a_closure_and_another_way_on_resuming_are_refused(tmp_path):
    model = Counting.Net()
    with pytest.raises(ValueError, match="a closure changes buffers in each evaluation"):
        unisono.Run(model, torch.optim.LBFGS(model.parameters()), buffers={"seen": "sum"})
    with pytest.raises(ValueError, match="'unknown' is none of"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        unisono.Run(model, optimizer, buffers={"unknown": "sum"})
