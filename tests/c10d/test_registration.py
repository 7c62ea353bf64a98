"""Whoever is imported first: the backend is there, and torch.compile leaves it as it is."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from unisono.runtime.c10d.group import Group

USE = """
import torch.distributed as dist
assert dist.Backend.backend_list.count("unisono") == 1
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "unisono"
tensor = __import__("torch").ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
assert not any("unisono" in type(finder).__module__ for finder in sys.meta_path)
assert "exec_module" not in vars(sys.modules["torch.distributed.distributed_c10d"].__loader__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["unisono, torch", "torch, unisono"])
def test_the_backend_is_there_in_either_order_of_imports(imports):
    subprocess.run([sys.executable, "-c", f"import sys, {imports}{USE}"], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know")  # it is told so that it breaks here
def test_a_collective_in_the_midst_of_a_compiled_function_is_left_as_it_is():
    group = Group(dist.HashStore(), 0, [0], 30.0)

    @torch.compile(backend="eager")
    def step(x):
        x = x + 1
        dist._broadcast_coalesced(group, [x], 1000, 0)  # what DDP calls, in C++
        return x * 2

    try:
        assert step(torch.ones(3)).tolist() == [4.0, 4.0, 4.0]
    finally:
        torch._dynamo.reset()
        group.shutdown()
