"""Random programs around `DataParallel`: whatever they do, the number of devices changes no bit.

Layers that are used again and again, activation checkpoints, several outputs of which some are
used, in any order, several calls before one backward pass, gradients of inputs.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono

STEPS = 2
DEVICES = [["cpu"], [0], [0, 1], [1, 3, 2], [0, 1, 2, 3]]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width, depth, times, has_checkpoints):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head, self.times, self.has_checkpoints = nn.Linear(width, 3), times, has_checkpoints

    def forward(self, x, scale=1.0):
        heads = []
        for _ in range(self.times):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.has_checkpoints else block(x)
            heads.append(self.head(x) * scale)
        random.Random(len(heads)).shuffle(heads)
        return {"heads": heads, "x": x}


def loss_of(outputs, chosen, on_the_host):
    """Sum some of the outputs of all calls up, in any order."""
    loss = 0
    for call in chosen.sample(range(len(outputs)), len(outputs)):
        heads = outputs[call]["heads"]
        for head in chosen.sample(heads, chosen.randint(1, len(heads))):
            loss = loss + (head.cpu() if on_the_host else head).sin().sum()
        if chosen.random() < 0.5:
            x = outputs[call]["x"]
            loss = loss + (x.cpu() if on_the_host else x).square().mean()
    return loss


def trained(seed, device_ids, shards):
    chosen = random.Random(seed)
    width, calls, batch = chosen.choice([3, 8]), chosen.randint(1, 4), chosen.randint(1, 9)
    on_the_host = chosen.random() < 0.5
    torch.manual_seed(seed)
    net = Net(width, chosen.randint(1, 3), chosen.randint(1, 4), chosen.random() < 0.4)
    first = device_ids[0] if device_ids == ["cpu"] else f"sim:{device_ids[0]}"
    model = unisono.DataParallel(net.to(first), device_ids, shards=shards)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(STEPS):
        inputs = [torch.randn(batch, width, requires_grad=True) for _ in range(calls)]
        outputs = [model(x, scale=1.0 + call) for call, x in enumerate(inputs)]
        loss = loss_of(outputs, chosen, on_the_host)
        optimizer.zero_grad()
        # As documented: with a loss elsewhere, three calls would meet in any order.
        with torch.autograd.set_multithreading_enabled(not on_the_host or calls < 3):
            loss.backward()
        optimizer.step()
    gradients = [each.grad for each in (*model.parameters(), *inputs) if each.grad is not None]
    return [each.tolist() for each in (*model.state_dict().values(), *gradients, torch.rand(3))]


@pytest.mark.parametrize(
    "seed",
    [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 60))],
)
def test_the_number_of_devices_changes_no_bit(seed, accelerator):
    shards = random.Random(seed).choice([2, 3, 4, 5, 8])
    first, *others = (trained(seed, device_ids, shards) for device_ids in DEVICES)
    assert all(other == first for other in others)
