"""Set a process group up, use it once, tear it down: the frame of every other program here.

    unisono run -n 2 examples/ddp/hello.py
    torchrun --nproc-per-node 2 examples/ddp/hello.py

The classic mistake that it avoids: *fixed ports*. A program with ``MASTER_PORT = "12355"`` in it
cannot be started twice on one machine. Whoever starts the workers says where they meet, on a port
that the system chose; ``init_process_group`` finds it in the environment.
"""

import torch
import torch.distributed as dist

import unisono


def main():
    here = unisono.world()
    if torch.cuda.is_available():
        torch.cuda.set_device(here.local_rank)
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("unisono")
    try:  # a group that is not torn down makes others wait, or the process end with a warning
        greet()
    finally:
        dist.destroy_process_group()


def greet():
    """Collective: every rank calls it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total = torch.tensor([rank], device=device)
    dist.all_reduce(total)
    print(
        f"rank {rank} of {world_size}, on {device} with {dist.get_backend()}: "
        f"all ranks together make {total.item()}"
    )


if __name__ == "__main__":
    main()
