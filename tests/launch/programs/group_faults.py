"""Something goes wrong in a program with process groups: how is the first argument."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono.runtime.workers.context import context

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAST = SIZE - 1

way, backend = sys.argv[1:3]


def die():
    os.kill(os.getpid(), 9)


if way == "killed before":
    if RANK == LAST:
        die()
elif way == "finished before":
    if RANK == LAST:
        sys.exit()
elif way == "vanished before":
    if RANK == LAST:
        os._exit(0)
elif way == "raised before" and RANK == LAST:
    raise KeyError("the original")
elif way == "late":
    context().team().meet("test")  # so that nobody else is late, however busy the machine
    if RANK == LAST:
        time.sleep(60)
elif way == "wrong size" and RANK == LAST:
    os.environ["WORLD_SIZE"] = "2"
seconds = 1 if way == "late" else 60
dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
dist.barrier()  # gloo writes lines of its own while some are still connecting
if RANK == LAST:
    if way == "killed":
        die()
    elif way == "raised":
        raise KeyError("the original")
    elif way == "finished":
        sys.exit()
for _ in range(10):
    dist.all_reduce(torch.ones(5))
