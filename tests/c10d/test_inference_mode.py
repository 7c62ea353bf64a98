"""Calls in torch's inference mode, and with tensors that were made in it."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from tests.c10d.options import options


def exchange(group, rank, tensor):
    group.send([tensor], 1 - rank, 0)
    group.recv([tensor], 1 - rank, 0).wait()


def all_gather(group, rank, tensor):
    gathered = [torch.empty_like(tensor), tensor]
    group.allgather([gathered], [tensor.clone()])
    tensor.copy_(sum(gathered))


def all_reduce(group, rank, tensor):
    group.allreduce([tensor])


def reduce(group, rank, tensor):
    group.reduce([tensor], options(dist.ReduceOptions))


CALLS = {
    "all_reduce": (all_reduce, (3, 3)),
    "reduce": (reduce, (3, 2)),
    "all_gather": (all_gather, (3, 3)),
    "messages": (exchange, (2, 1)),
}


@pytest.mark.parametrize("shape", [(5, 1), (100_000, 1), (3, 4)])
@pytest.mark.parametrize("call", CALLS)
def test_it_makes_no_difference(as_ranks, call, shape):
    act, wanted = CALLS[call]

    def work(group, rank):
        seen = []
        for mode in (torch.inference_mode, contextlib.nullcontext, torch.inference_mode):
            with mode():
                tensor = torch.full(shape, rank + 1.0).t()
                act(group, rank, tensor)
                seen.append(tensor.unique().tolist())
        with torch.inference_mode():
            tensor = torch.full(shape, rank + 1.0).t()
        if call != "all_gather":  # which writes to the tensor itself
            act(group, rank, tensor)
            seen.append(tensor.unique().tolist())
        return seen

    for rank, seen in enumerate(as_ranks(2, work)):
        assert seen == [[wanted[rank]]] * len(seen)


def test_what_is_reduced_outside_can_still_be_differentiated(as_ranks):
    def work(group, rank):
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * weight).sum()
        with torch.no_grad():
            group.allreduce([weight])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        (weight * weight).sum().backward()
        return weight.grad.tolist()

    assert as_ranks(2, work) == [[4.0] * 3] * 2
