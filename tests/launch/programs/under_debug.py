"""torch's checks are on; DDP, and calls that differ, in a group of the backend that is named."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

backend = sys.argv[1]
assert dist.get_debug_level() == dist.DebugLevel.DETAIL
assert __import__("faulthandler").is_enabled()
dist.init_process_group(backend)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
for _ in range(3):
    model(torch.full((4, 3), dist.get_rank() + 1.0)).sum().backward()
gradients = [None] * dist.get_world_size()
dist.all_gather_object(gradients, model.module.weight.grad.tolist())
assert all(gradient == gradients[0] for gradient in gradients)
with pytest.raises(Exception, match=r"2(.|\n)*3|3(.|\n)*2"):
    dist.all_reduce(torch.ones(2 + dist.get_rank()))
print("done", flush=True)
os._exit(0)
