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
    # NCCL where there is a GPU, else "unisono"; the device chosen, generators seeded. At the end of
    # the block the group is torn down, also after an exception.
    with unisono.distributed.init() as here:
        greet(here)


def greet(here):
    """Collective: every rank calls it."""
    total = torch.tensor([here.rank], device=here.device)
    dist.all_reduce(total)
    print(
        f"rank {here.rank} of {here.world_size}, on {here.device} with {here.backend}: "
        f"all ranks together make {total.item()}"
    )


if __name__ == "__main__":
    main()
