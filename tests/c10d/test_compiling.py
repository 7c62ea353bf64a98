"""A compiled function may come to the backend through C++, and the backend is not compiled."""

import pytest
import torch
import torch.distributed as dist

from unisono.runtime.c10d.group import Group


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
