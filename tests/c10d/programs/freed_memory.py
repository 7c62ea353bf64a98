"""Count the page faults of blocks that come and go, before a group is made and after."""

import resource

import torch
import torch.distributed as dist

import unisono  # noqa: F401

NUM_BLOCKS = 4
NUM_FLOATS = 16 << 20  # 64 MiB: larger than what glibc would keep of its own accord


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(NUM_BLOCKS):
        torch.empty(NUM_FLOATS).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


torch.set_num_threads(1)
without_group = faults()
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
# The first block is new, and so is one whose place something small has taken meanwhile.
with_group = min(faults() for _ in range(8))
dist.destroy_process_group()
print(without_group, with_group)
