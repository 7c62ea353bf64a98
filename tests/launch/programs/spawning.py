"""Start ranks with torch.multiprocessing.spawn, as programs do that know no launcher.

Arguments: ways to meet with a backend each, such as ``env gloo,file unisono``; a port for each; a
path. With ``inherit`` as the way, address and port are those that the environment says. (At one
port torch's own stores of two groups in turn may take each other's ranks.)
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unisono  # noqa: F401

NUM_RANKS = 2


def main(rank, size=NUM_RANKS):
    ways, ports, *path = (argument.split(",") for argument in sys.argv[1:])
    for words, port in zip(ways, ports, strict=True):
        way, backend = words.split()
        if way == "file":
            dist.init_process_group(
                backend, f"file://{path[0][0]}-{backend}", rank=rank, world_size=size
            )
        elif way == "tcp":
            address = f"tcp://127.0.0.1:{port}"
            dist.init_process_group(backend, address, rank=rank, world_size=size)
        else:
            if way == "env":
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
            dist.init_process_group(backend, rank=rank, world_size=size)
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 3
        dist.barrier()
        dist.destroy_process_group()
        print("done", flush=True)


if __name__ == "__main__":
    mp.spawn(main, nprocs=NUM_RANKS)
    if "inherit" in sys.argv[1]:  # once more, at what the first ones have left behind
        mp.spawn(main, args=(NUM_RANKS,), nprocs=NUM_RANKS)
