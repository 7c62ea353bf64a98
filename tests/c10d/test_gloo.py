"""Which groups does our backend make where gloo is asked for? Torch's function is a stand-in."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.promises import promise
from torch.distributed import distributed_c10d as torchs

from unisono.runtime.c10d.registration import on_our_backend


@pytest.fixture
def asked_of_torch():
    """Say what torch is asked for when a program asks for `backend`."""

    @functools.wraps(torchs._new_process_group_helper)
    def made(*args, **kwargs):
        seen.append((args[3], kwargs.get("backend_options")))
        return torchs.GroupMember.NON_GROUP_MEMBER, None

    def ask(backend, rank=0):
        options = {"backend_options": "options"}
        assert on_our_backend(rank)(made)(2, 0, [], backend, None, "0", **options)[1] is None
        return seen.pop()

    seen = []
    return ask


@promise("where-it-ends.10")
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "undefined"])
def test_what_is_asked_of_gloo_is_asked_of_our_backend_without_options(asked_of_torch, backend):
    assert asked_of_torch(backend) == ("unisono", None)


@pytest.mark.parametrize("backend", ["unisono", "cpu:unisono", "nccl", "cuda:gloo", "mpi", "fake"])
def test_what_is_not_asked_of_gloo_is_left_alone(asked_of_torch, backend):
    assert asked_of_torch(backend) == (backend, "options")


@promise("where-it-ends.10")
def test_gloo_stays_beside_a_backend_for_gpus_and_rank_0_says_so(
    asked_of_torch, monkeypatch, capsys
):
    assert asked_of_torch("cpu:gloo,cuda:nccl") == ("unisono", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for rank in (0, 1):
        assert asked_of_torch("cpu:gloo,cuda:nccl", rank) == ("cpu:gloo,cuda:nccl", "options")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('unisono: the process group "cpu:gloo,cuda:nccl" combines gloo with')
