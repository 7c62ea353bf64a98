"""Train with torch's DDP over gloo, the model of `train.py`; or only all-reduce as many bytes."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from tests.hosts.programs.models import Gpt
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--ring", action="store_true")
given = parser.parse_args()
os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = Gpt(given.width)
rank, world_size = dist.get_rank(), dist.get_world_size()
inputs, targets = (t[rank::world_size] for t in Gpt.data(seed=0)[:32])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
flat = torch.ones(sum(p.numel() for p in model.parameters()))
network = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
begun_s = time.monotonic()
for _ in range(given.steps):
    if given.ring:
        dist.all_reduce(flat)
    else:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
dist.barrier()
print(f"rank {rank} took {time.monotonic() - begun_s:.3f} s for {flat.nbytes} bytes", flush=True)
dist.destroy_process_group()
