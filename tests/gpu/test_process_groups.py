"""DistributedDataParallel and the backend ``unisono`` on a GPU, as far as one GPU can show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu import cases
from tests.gpu.devices import CUDA, deterministic, launch
from tests.gpu.loops import Weights, first_difference, weights_of

import unisono

STEPS = 4


def train_in_a_group(device: str, kind: str, backend: str | None) -> Weights:
    """Train as programs for torch.distributed do; `kind`: whose DDP, or "plain" for none."""
    torch.manual_seed(0)
    with unisono.distributed.init(backend) as here:
        on = torch.device(device, 0) if device == CUDA else here.device
        model = cases.CASES["gpt, certain"].model(device).to(on)
        wrapped: torch.nn.Module = model
        if kind != "plain":
            classes = {
                "torch": torch.nn.parallel.DistributedDataParallel,
                "unisono": unisono.distributed.DistributedDataParallel,
            }
            wrapped = classes[kind](model, device_ids=[on] if on.type == CUDA else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        share = cases.BATCH_SIZE // here.world_size
        with deterministic():
            for step in range(STEPS):
                start = (step % 2) * cases.BATCH_SIZE + here.rank * share
                (tokens,) = cases.texts()[start : start + share]
                optimizer.zero_grad()
                cases.next_token(wrapped, [tokens.to(on)]).backward()
                optimizer.step()
        weights = weights_of(model)
        del wrapped, optimizer
    return weights


@pytest.mark.on_the_cpu_too
@pytest.mark.parametrize("kind", ["torch", "unisono"])
def test_one_rank_has_the_bits_of_a_plain_loop(kind, device):
    """The group is NCCL's on a GPU."""
    (plain,) = launch(train_in_a_group, device, "plain", None, workers=1, device=device)
    (ours,) = launch(train_in_a_group, device, kind, None, workers=1, device=device)
    assert first_difference(ours, plain) is None


@pytest.mark.parametrize("kind", ["torch", "unisono"])
def test_two_ranks_on_one_gpu_agree_through_gloo(kind, device):
    """NCCL refuses two ranks on one GPU; gloo copies what lies on it through the host's memory."""
    one, other = launch(train_in_a_group, device, kind, "gloo", workers=2, device=device)
    assert first_difference(one, other) is None
    (plain,) = launch(train_in_a_group, device, "plain", "gloo", workers=1, device=device)
    for name, value in plain.items():
        torch.testing.assert_close(one[name], value, rtol=1e-3, atol=1e-4)


def reduce_both(device: str) -> dict[str, Any]:
    """Sum tensors of the host and of the device in one group, each by the backend for it."""
    found: dict[str, Any] = {}
    with unisono.distributed.init("cpu:unisono,cuda:nccl") as here:
        for on in ("cpu", here.device):
            numbers = torch.arange(5.0, device=on)
            dist.all_reduce(numbers)
            found[str(on)] = numbers.tolist()
    return found


@pytest.mark.needs_cuda
def test_a_group_of_our_backend_and_nccl_sums_where_tensors_lie(device):
    numbers = [0.0, 1.0, 2.0, 3.0, 4.0]
    (found,) = launch(reduce_both, device, workers=1, device=device)
    assert found == {"cpu": numbers, "cuda:0": numbers}


def reduce_on_gpu(device: str) -> str:
    """Hand a tensor on a GPU to a group for CPUs; returns what is said."""
    with unisono.distributed.init("unisono"):
        try:
            dist.all_reduce(torch.ones(2, device=device))
        except (RuntimeError, ValueError) as error:
            return str(error)
    return ""


@pytest.mark.needs_cuda
def test_our_backend_alone_refuses_tensors_on_a_gpu(device):
    (said,) = launch(reduce_on_gpu, device, workers=1, device=device)
    assert "cuda" in said


def share_one_gpu(device: str) -> str:
    """Ask for NCCL where two workers share a GPU."""
    with unisono.distributed.init("nccl"):
        return ""


@pytest.mark.needs_cuda
def test_two_ranks_that_share_a_gpu_are_refused_for_nccl(device):
    with pytest.raises(ValueError, match=r"must have its own GPU"):
        launch(share_one_gpu, device, workers=2, device=device)
