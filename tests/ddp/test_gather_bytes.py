"""Tensors are gathered by whatever name torch has for it."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import unisono
from unisono.distributed.averaging import gather_bytes

NEW, OLD = "all_gather_single", "all_gather_into_tensor"


def gather_by_both():
    rank, group = dist.get_rank(), dist.group.WORLD
    found = []
    for only in (NEW, OLD):
        if not hasattr(dist, only):
            continue
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            if only == OLD:
                patch.delattr(dist, NEW, raising=False)
                warnings.simplefilter("ignore", FutureWarning)  # which a torch without it has not
            output = torch.empty(3, 2, dtype=torch.bfloat16)
            gather_bytes(output, torch.tensor([rank, rank + 0.5]).bfloat16(), group)
            assert output.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]
            found.append(gradients(rank))
    return all(torch.equal(*pair) for pair in zip(found[0], found[-1], strict=True))


def gradients(rank):
    torch.manual_seed(0)
    dense = unisono.distributed.DistributedDataParallel(nn.Linear(3, 5))
    dense(torch.ones(2, 3) * (rank + 1)).sum().backward()
    sparse = unisono.distributed.DistributedDataParallel(nn.Embedding(9, 2, sparse=True))
    sparse(torch.tensor([rank, 5])).sum().backward()
    return [dense.module.weight.grad, sparse.module.weight.grad.to_dense()]


@pytest.mark.slow
def test_a_torch_that_has_one_name_only_will_do(on_ranks):
    assert on_ranks("gloo", 3, gather_by_both) == [True] * 3
