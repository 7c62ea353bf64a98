"""Streams files of different sizes; all ranks stop at the fewest steps."""

import itertools

import torch
import torch.distributed as dist
from separable import separable as task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

SIZES = [40, 72, 56, 88]


class Shards(IterableDataset):
    def __init__(self, rank, world):
        self.files = list(enumerate(SIZES))[rank::world]

    def __iter__(self):
        for seed, n in self.files:
            x, y = task(n, seed)
            yield from zip(x, y, strict=True)

    def __len__(self):
        return sum(n for _, n in self.files)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = Shards(rank, world)
loader = DataLoader(data, batch_size=32 // world, drop_last=True)
fewest = [None] * world
dist.all_gather_object(fewest, len(data) // (32 // world))
fewest = min(fewest)
model = DistributedDataParallel(nn.Linear(10, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in itertools.islice(loader, fewest):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    if rank == 0:
        print("epoch", epoch, "done")
dist.destroy_process_group()
