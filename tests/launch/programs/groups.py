"""Make process groups as programs do, in the ways that the first argument names, and use them."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORT = "12355"  # as in most programs; nobody listens there


def summed(group=None):
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def once(backend, **options):
    dist.init_process_group(backend, **options)
    total = summed()
    dist.barrier()
    dist.destroy_process_group()
    assert total == SIZE * (SIZE + 1) / 2, total


def make(way, backend, *path):
    if way == "plain":
        once(backend)
    elif way == "none":
        once(None)
    elif way == "env":
        once(backend, init_method="env://")
    elif way == "overwrite":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", PORT
        once(backend, rank=RANK, world_size=SIZE)
    elif way == "tcp":
        for host in ("localhost", "127.0.0.1"):
            once(backend, init_method=f"tcp://{host}:{PORT}", rank=RANK, world_size=SIZE)
    elif way == "file":
        once(backend, init_method=f"file://{path[0]}", rank=RANK, world_size=SIZE)
    elif way == "again":
        for _ in range(5):
            once(backend)
        once(backend, init_method=f"tcp://localhost:{PORT}", rank=RANK, world_size=SIZE)
    elif way == "groups":
        dist.init_process_group(backend)
        first = dist.new_group([0, 1])
        if RANK < 2:
            assert summed(first) == 3.0
        each = dist.new_group()
        assert summed(each) == SIZE * (SIZE + 1) / 2
        gathered = [None] * SIZE
        dist.all_gather_object(gathered, {"rank": RANK})
        assert gathered == [{"rank": rank} for rank in range(SIZE)]
        dist.destroy_process_group()
    elif way == "own store":
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = dist.TCPStore(*address, SIZE, RANK == 0, timeout=timedelta(seconds=30))
        once(backend, store=store, rank=RANK, world_size=SIZE)
        once(backend)
        # Whoever holds the store leaves last, and nobody waits for its answer then.
        store.set(f"bye {RANK}", "")
        if RANK == 0:
            store.wait([f"bye {rank}" for rank in range(SIZE)])


ways, *options = sys.argv[1:]
for way in ways.split(","):
    make(way, *options)
print("done")
