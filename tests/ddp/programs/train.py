"""Train on three ranks, however they were started, and print a digest: HOW BACKEND FILE."""

import os
import sys
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.ddp.training import digest, made, train

import unisono


def main(rank, world_size, backend, file):
    init_method = f"file://{file}" if file else None
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    ddp = made(bucket_cap_mb=0.01)
    print(digest(ddp, train(ddp, 2)), flush=True)
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    how, backend, file = sys.argv[1:]
    if how == "spawn":
        mp.spawn(main, (3, backend, file), 3)
    else:
        world = unisono.world()
        main(world.rank, world.world_size, backend, file)
