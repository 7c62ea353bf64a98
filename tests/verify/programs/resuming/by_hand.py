"""DDP with momentum and dropout that saves everything every other step, and skips what was read."""

import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
random.seed(rank)
np.random.seed(rank)
x = torch.randn(64, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 1)))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
path = Path(f"checkpoint-{rank}.pt")
done = 0
if path.exists():
    saved = torch.load(path)
    done = saved["done"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
for epoch in range(2):
    sampler.set_epoch(epoch)
    first = epoch * len(loader)
    if first + len(loader) <= done:
        continue
    # Making an iterator draws a number: it belongs to the epoch's beginning.
    state = torch.get_rng_state()
    batches = enumerate(loader, first)
    for number, (inputs, targets) in batches:
        if number == max(first, done):
            torch.set_rng_state(state)
        if number < done:
            continue
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if number % 2:
            checkpoint = {
                "done": number + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
            }
            partial = path.with_suffix(".partial")
            torch.save(checkpoint, partial)
            os.replace(partial, path)
dist.barrier()
