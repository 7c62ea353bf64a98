"""torch's own parallelism on the backend: DDP in its variants, FSDP2, meshes, DTensors, pipelines.

Arguments: rank, world size, file for the rendezvous.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import unisono

rank, world_size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Net(nn.Module):
    """Some layers, a buffer, and a layer that only some passes use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU())
        self.middle = nn.Linear(300, 200)
        self.seldom = nn.Linear(200, 200)
        self.head = nn.Linear(200, 7)

    def forward(self, x, seldom=True):
        x = self.middle(self.layers(x))
        return self.head(self.seldom(x) if seldom else x)


def net():
    torch.manual_seed(5)
    return Net()


def batch(step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 20, generator=generator)


def gradients(model):
    return torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])


def same_everywhere(tensor):
    everybodys = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(everybodys, tensor)
    assert all(torch.equal(tensor, other) for other in everybodys)


def ddp_gradients_do_not_depend_on_the_buckets():
    seen = []
    for bucket_cap_mb in (25, 0.2, 0.01):
        model = DistributedDataParallel(net(), bucket_cap_mb=bucket_cap_mb)
        for step in range(3):  # buckets are built anew after the first
            model.zero_grad()
            model(batch(step)).square().mean().backward()
        same_everywhere(gradients(model))
        seen.append(gradients(model))
    assert all(torch.equal(seen[0], other) for other in seen)


def ddp_has_its_variants():
    for options in (
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ):
        model = DistributedDataParallel(net(), **options)
        for step in range(3):
            model.zero_grad()
            uses_all = not options.get("find_unused_parameters") or step % 2 == 0
            model(batch(step), seldom=uses_all).square().mean().backward()
        same_everywhere(gradients(model))
    model = DistributedDataParallel(net())
    with model.no_sync():
        model(batch(0)).square().mean().backward()
    model(batch(1)).square().mean().backward()
    same_everywhere(gradients(model))
    model = DistributedDataParallel(net())
    model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    model(batch()).square().mean().backward()
    same_everywhere(gradients(model))
    model = DistributedDataParallel(nn.Linear(20, 3))
    with model.join():
        for step in range(2 + rank):
            model(batch(step)).square().mean().backward()


def hooks_of_torch_in_cpp_do_what_those_in_python_do():
    for builtin, in_python in (
        (BuiltinCommHookType.ALLREDUCE, allreduce_hook),
        (BuiltinCommHookType.FP16_COMPRESS, fp16_compress_hook),
    ):
        seen = []
        for ddp in (DistributedDataParallel, unisono.distributed.DistributedDataParallel):
            for options in ({}, {"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True}):
                model = ddp(net(), **options)
                model._register_builtin_comm_hook(builtin)
                seen.append(gradients_of_three_steps(model))
            model = ddp(net())
            model.register_comm_hook(dist.group.WORLD, in_python)
            seen.append(gradients_of_three_steps(model))
        same_everywhere(seen[0])
        assert all(torch.equal(seen[0], other) for other in seen)


def gradients_of_three_steps(model):
    for step in range(3):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
    return gradients(model).clone()


def fsdp_trains_as_one_process_does():
    model, alone = net(), net()
    for module in (model.layers, model.middle, model.seldom, model.head, model):
        fully_shard(module)
    model.set_allocate_memory_from_process_group_for_comm(True)
    whole = torch.cat([batch(0)[:0], *gathered(batch(0))])
    for one, x in ((model, batch(0)), (alone, whole)):
        one.eval()
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(x).square().mean().backward()
        optimizer.step()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected)


def gathered(tensor):
    everybodys = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(everybodys, tensor)
    return everybodys


def meshes_have_their_groups():
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("outer", "inner"))
    torch.manual_seed(0)
    tensor = torch.randn(8, 5)
    sharded = distribute_tensor(tensor, mesh["inner"], [Shard(0)])
    assert torch.equal(sharded.full_tensor(), tensor)
    assert torch.equal(sharded.redistribute(placements=[Shard(1)]).full_tensor(), tensor)
    total = sharded.sum().redistribute(placements=[Replicate()]).to_local()
    torch.testing.assert_close(total, tensor.sum())


def pipelines_run():
    torch.manual_seed(1)
    stages = [nn.Linear(20, 20) for _ in range(world_size)]
    stage = PipelineStage(stages[rank], rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(2)
    x, target = torch.randn(8, 20), torch.randn(8, 20)
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    mine = [p.grad.clone() for p in stages[rank].parameters()]
    for one in stages:
        one.zero_grad()
    for x_part, target_part in zip(x.chunk(4), target.chunk(4), strict=True):
        for one in stages:
            x_part = one(x_part)
        (nn.functional.mse_loss(x_part, target_part) / 4).backward()
    for grad, parameter in zip(mine, stages[rank].parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


torch.set_num_threads(1)
dist.init_process_group(
    "unisono",
    init_method=f"file://{path}",
    rank=rank,
    world_size=world_size,
    timeout=timedelta(seconds=60),
)
for check in (
    ddp_gradients_do_not_depend_on_the_buckets,
    ddp_has_its_variants,
    hooks_of_torch_in_cpp_do_what_those_in_python_do,
    fsdp_trains_as_one_process_does,
    meshes_have_their_groups,
    pipelines_run,
):
    check()
    print(check.__name__, flush=True)
dist.destroy_process_group()
assert unisono.__version__
