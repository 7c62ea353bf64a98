"""Make one group of all, then wait for a second that rank 0 never comes to."""

import os
import signal

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    print("in a group", flush=True)
    while True:
        signal.pause()
dist.destroy_process_group()
dist.init_process_group("gloo")
raise AssertionError(os.environ["RANK"])
