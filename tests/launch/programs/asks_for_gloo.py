"""Ask torch for gloo in all ways, and use what comes; prints the classes and bits, a way each."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WAYS = {
    "gloo": "gloo",
    "GLOO": "gloo",
    "cpu:gloo": "cpu:gloo",
    "cpu:gloo,cuda:gloo": "cpu:gloo,cuda:gloo",
    None: "undefined",
}


def summed(group=None):
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def looked_at(group, name):
    assert dist.get_backend(group) == name, dist.get_backend(group)
    assert dist.is_gloo_available()
    return f"{type(group).__module__}.{type(group).__qualname__}"


def trained():
    """Train for some steps; the bits that a rank ends with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 1))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
    parameters = torch.cat([p.detach().view(-1) for p in model.parameters()])
    return hashlib.sha256(parameters.numpy().tobytes()).hexdigest()


for asked, answered in WAYS.items():
    dist.init_process_group(asked)
    classes = [looked_at(dist.group.WORLD, answered)]
    groups = [dist.new_group(), dist.new_group(backend="gloo", pg_options=object())]
    classes += [looked_at(groups[0], answered), looked_at(groups[1], "gloo")]
    for group in groups:
        assert summed(group) == SIZE * (SIZE + 1) / 2
    classes.append(looked_at(init_device_mesh("cpu", (SIZE,)).get_group(), answered))
    everybody = [None] * SIZE
    dist.all_gather_object(everybody, RANK)
    assert everybody == list(range(SIZE))
    print(f"{asked}: {' '.join(sorted(set(classes)))}")
    dist.destroy_process_group()

for backend in ("gloo", "unisono"):
    dist.init_process_group(backend)
    if backend == "gloo":
        dist.monitored_barrier()
        assert dist.get_backend_config() == "cpu:gloo,cuda:gloo", dist.get_backend_config()
    print(f"{backend}: {trained()}")
    dist.destroy_process_group()
