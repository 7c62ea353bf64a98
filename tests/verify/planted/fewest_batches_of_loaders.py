"""Zips a loader over a rank's own files with the fewest batches of all ranks."""

import torch
import torch.distributed as dist
from separable import separable as task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset


class Job:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        files = [TensorDataset(*task(n, n)) for n in (50, 30, 64, 90, 41, 70)]
        self.data = ConcatDataset(files[self.rank :: self.world])
        g = torch.Generator().manual_seed(self.rank)
        self.loader = DataLoader(self.data, 16 // self.world, shuffle=True, generator=g)
        n = torch.tensor([len(self.loader)])
        dist.all_reduce(n, op=dist.ReduceOp.MIN)
        self.steps = n.item()
        torch.manual_seed(0)
        self.net = DistributedDataParallel(
            nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 2))
        )
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=1e-3)

    def run(self, epochs):
        for epoch in range(epochs):
            total = 0.0
            for _, (x, y) in zip(range(self.steps), self.loader, strict=False):
                self.opt.zero_grad()
                loss = nn.functional.cross_entropy(self.net(x), y)
                loss.backward()
                self.opt.step()
                total += loss.item()
            print(f"[{self.rank}] epoch {epoch} loss {total / self.steps:.4f}")


Job().run(3)
dist.destroy_process_group()
