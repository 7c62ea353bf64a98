"""Ranks that wait for each other in another order, as programs with ``async_op=True`` may.

Arguments: rank, world size, file for the rendezvous, backend. Prints what rank 0 has in the end.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import unisono  # noqa: F401

rank, world_size, path, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world_size)
everybody = list(range(world_size))
groups = [dist.new_group(everybody), dist.new_group(everybody)]
seen = []

# Two groups, in one order here and in the other there.
tensors = [torch.full((70_001,), 1.0 + rank), torch.full((5,), 10.0 + rank)]
order = [0, 1] if rank == 0 else [1, 0]
works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
for work in works:
    work.wait()
seen += [tensor.unique().tolist() for tensor in tensors]

# A message is sent only when a collective has been called, and received before it is.
tensor, told = torch.full((3,), 1.0 + rank), torch.zeros(1)
if rank == 0:
    work = dist.all_reduce(tensor, async_op=True)
    for other in everybody[1:]:
        dist.send(torch.ones(1), other)
    work.wait()
else:
    dist.recv(told, 0)
    dist.all_reduce(tensor)
seen.append(tensor.tolist())

# Many calls under way, of every kind, and a call that waits for its turn among them.
time.sleep(0.05 * rank)
total, parts = torch.tensor([1.0 + rank]), [torch.zeros(2) for _ in everybody]
shared, part = torch.tensor([float(rank)]), torch.zeros(3)
given, taken = torch.arange(2.0 * world_size) + 100 * rank, torch.zeros(2 * world_size)
works = [
    dist.all_reduce(total, async_op=True),
    dist.all_gather(parts, torch.tensor([rank, 7.0]), async_op=True),
    dist.broadcast(shared, world_size - 1, async_op=True),
    dist.reduce_scatter(part, [torch.full((3,), float(rank + i)) for i in everybody], async_op=True)
    if backend == "unisono"
    else None,
    dist.all_to_all_single(taken, given, async_op=True),
    dist.barrier(async_op=True),
]
functional_total = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
objects = [None] * world_size
dist.all_gather_object(objects, rank)
for work in filter(None, works):
    work.wait()
if backend != "unisono":
    part = torch.full((3,), float(sum(everybody) + rank * world_size))
seen += [total, parts, shared, part, taken, functional.wait_tensor(functional_total), objects]
if rank == 0:
    print(seen)

# Called and never waited for: it is carried out before the group is left.
last = torch.tensor([float(rank)])
time.sleep(0.05 * rank)
dist.broadcast(last, 0, async_op=True)
dist.destroy_process_group()
if last.item() != 0.0:
    sys.exit(f"rank {rank} has {last.item()} of rank 0's last call")
