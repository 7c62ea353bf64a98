"""Rank 1 is killed; the others say what they learn and leave well.

Arguments: rank, world size, file for the rendezvous, and where: "together" in a row of all_reduces,
or "elsewhere", while rank 0 waits for a message of it and the others in an all_reduce.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

import unisono

rank, world_size, path, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("unisono", init_method=f"file://{path}", rank=rank, world_size=world_size)
dist.barrier()
try:
    if where == "elsewhere" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "elsewhere" and rank == 0:
        dist.recv(torch.empty(3), 1)
    for step in range(1000):
        dist.all_reduce(torch.ones(100_000))
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except unisono.errors.PeerLostError as error:
    print(error)
    dist.destroy_process_group()
else:
    sys.exit("nobody noticed")
