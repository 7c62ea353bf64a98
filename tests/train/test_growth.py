"""Memory, descriptors and processes of a program that goes on for long do not grow."""

import ctypes
import os
import re
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

pytestmark = pytest.mark.long
MB = 1 << 20


def used():
    """Say what this process has: bytes of its own, descriptors, threads, children."""
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/smaps_rollup").read_text()
    private = sum(int(kb) for kb in re.findall(r"Private_(?:Clean|Dirty): +(\d+)", text))
    children = len(psutil.Process().children(recursive=True))
    return [private * 1024, len(os.listdir("/proc/self/fd")), threading.active_count(), children]


def made(num_fits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, seed=0)
    data = TensorDataset(torch.randn(64, 256), torch.randint(10, (64,)))
    seen = []
    for number in range(num_fits):
        trainer.fit(data, batch_size=16, epochs=number + 1, validate=data)
        seen.append(used())
    return seen


def steps(num_steps):
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=1e-3), shards=2, seed=0)
    data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    seen = []
    for step in run.steps(data, batch_size=8, steps=num_steps):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))
        if step.number % (num_steps // 10) == num_steps // 10 - 1:
            seen.append(used())
    return seen


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def check(seen):
    """Compare the last third with the one before: nothing may have become more for each turn."""
    third = len(seen) // 3
    before, after = seen[-2 * third : -third], seen[-third:]
    assert min(one[0] for one in after) <= max(one[0] for one in before) + 2 * MB, seen
    for kind in (1, 2, 3):
        assert min(one[kind] for one in after) <= max(one[kind] for one in before), seen


@pytest.mark.parametrize("workers", [1, 2])
def test_thirty_fits_take_no_more_than_ten(workers):
    for seen in unisono.launch(made, 30, workers=workers):
        check(seen)


@pytest.mark.timeout(900)
def test_thirty_thousand_steps_take_no_more_than_ten_thousand():
    for seen in unisono.launch(steps, 30_000, workers=2):
        check(seen)


def test_thirty_launches_take_no_more_than_ten():
    seen = []
    for _ in range(30):
        unisono.launch(steps, 10, workers=2)
        seen.append(used())
    check(seen)
