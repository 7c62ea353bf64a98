"""As in torch's tutorial “Multi GPU training with DDP”, which starts its ranks itself."""

import os

import torch
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group


def ddp_setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12356"
    torch.cuda.set_device(rank)
    init_process_group(backend="nccl", rank=rank, world_size=world_size)


def main(rank, world_size):
    ddp_setup(rank, world_size)
    destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count() or 2
    mp.spawn(main, args=(world_size,), nprocs=world_size)
