"""What the tests train: odd sizes, several kinds of layers, other data on every rank."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import unisono

CLASSES = {"ours": lambda: unisono.distributed.DistributedDataParallel, "torch": lambda: TorchDDP}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 13, 3)
        self.norm = nn.BatchNorm2d(13)
        self.hidden = nn.Linear(13 * 25, 101)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(101, 7)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(1)
        return self.out(self.hidden(x).relu() * self.scale)


def data(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 3, 7, 7, generator=generator), torch.randint(7, (5,), generator=generator)


def train(ddp, num_steps, set_to_none=True, dtype=torch.float32):
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    for step in range(num_steps):
        x, y = data(step)
        optimizer.zero_grad(set_to_none=set_to_none)
        nn.functional.cross_entropy(ddp(x.to(dtype)), y).backward()
        optimizer.step()
    return optimizer


def digest(model, optimizer):
    """Hash parameters, the optimizer's state, and the buffers that the next step begins with."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    tensors += [*model.parameters(), *model.buffers()]
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def made(cls="ours", dtype=torch.float32, **options):
    torch.manual_seed(0)
    return CLASSES[cls]()(Net().to(dtype), **options)
