"""For programs that use torch.distributed themselves.

``init`` sets up the process group and tears it down. ``DistributedDataParallel`` is torch's with
one order of summation on every backend, ``DistributedSampler`` torch's with every sample once.
"""

from unisono.distributed.distributed_sampler import DistributedSampler
from unisono.distributed.module import DistributedDataParallel
from unisono.distributed.process_group import init

__all__ = ["DistributedDataParallel", "DistributedSampler", "init"]
