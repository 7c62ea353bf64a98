"""Train a DDP model for two steps over gloo inside of a function, again and again."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import unisono


def train(wrapper):
    dist.init_process_group("gloo")
    model = wrapper(nn.Linear(10, 5))
    for _ in range(2):
        model(torch.randn(8, 10)).pow(2).mean().backward()
    # From here on only the model's reducer, in C++, has the group.
    dist.destroy_process_group()


wrappers = {
    "torch": nn.parallel.DistributedDataParallel,
    "unisono": unisono.distributed.DistributedDataParallel,
}
for _ in range(30):
    train(wrappers[sys.argv[1]])
print("done")
