"""All-reduce as many bytes a step as the gradients of `train.py` have, by gloo."""

import argparse
import os

import torch
import torch.distributed as dist
from tests.hosts.programs.models import Gpt

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
parser.add_argument("--steps", type=int)
given = parser.parse_args()
os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
torch.set_num_threads(1)
dist.init_process_group("gloo")
flat = torch.ones(sum(p.numel() for p in Gpt(given.width).parameters()))
for _ in range(given.steps):
    dist.all_reduce(flat)
dist.barrier()
dist.destroy_process_group()
