"""The backend as torch's programs use it, in real processes."""

import pytest
import torch
import torch.distributed as dist
from tests.promises import promise
from torch.distributed import _functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode

import unisono

pytestmark = pytest.mark.slow


@promise("where-it-ends.10")
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_every_collective_gives_gloos_bits_or_the_trees(run_ranks, world_size):
    for rank, ended in enumerate(run_ranks("against_gloo.py", world_size)):
        assert ended.returncode == 0, f"rank {rank}: {ended.stdout}"


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_ddp_fsdp_meshes_and_pipelines_run_on_it(run_ranks, world_size):
    for rank, ended in enumerate(run_ranks("torch_on_top.py", world_size)):
        assert ended.returncode == 0, f"rank {rank}: {ended.stdout}"


def collectives_that_a_dispatcher_sees():
    dist.init_process_group("unisono")
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    with Watch():
        total = torch.ones(2)
        dist.all_reduce(total)
        functional.all_reduce(total, "sum", dist.group.WORLD).wait()
    dist.destroy_process_group()
    return sorted(name for name in set(seen) if "c10d" in name), total.tolist()


@promise("where-it-ends.10")
def test_who_watches_the_dispatcher_sees_functional_collectives_alone():
    for seen in unisono.launch(collectives_that_a_dispatcher_sees, workers=2):
        assert seen == (["_c10d_functional"], [2.0, 2.0])
