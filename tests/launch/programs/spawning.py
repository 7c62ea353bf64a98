"""Start ranks with torch.multiprocessing.spawn, as programs do that know no launcher.

Arguments: a way to meet, a backend, and (for ``file``) a path. Alone, the address is the program's
own; with ``inherit`` as the way it is what the environment says.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unisono  # noqa: F401

NUM_RANKS = 2


def main(rank, size=NUM_RANKS):
    way, backend, place = sys.argv[1:]
    if way == "file":
        dist.init_process_group(backend, f"file://{place}", rank=rank, world_size=size)
    elif way == "tcp":
        dist.init_process_group(backend, f"tcp://127.0.0.1:{place}", rank=rank, world_size=size)
    else:
        if way == "env":
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", place
        dist.init_process_group(backend, rank=rank, world_size=size)
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    mp.spawn(main, nprocs=NUM_RANKS)
    if sys.argv[1] != "file":
        mp.spawn(main, args=(NUM_RANKS,), nprocs=NUM_RANKS)
