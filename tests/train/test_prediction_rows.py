"""The file in which predictions lie has the rows of all hosts in the end."""

import os
import threading

import pytest
import torch
from tests.threads import in_threads

from unisono.plan.samples import SamplePlan
from unisono.runtime.procfs import create_memory
from unisono.training.predictions import Rows, layout_of, share_rows


class FakeTeam:
    """One of the workers on some hosts, as threads."""

    def __init__(self, rank, hosts, barrier, posts):
        self.hosts, self._rank, self._barrier, self._posts = hosts, rank, barrier, posts
        self.host = next(at for at, ranks in enumerate(hosts) if rank in ranks)
        self.leads_host = rank == hosts[self.host][0]
        self._came, self._put = {}, b""

    def attach(self, data):
        self._put = data

    def meet(self, purpose):
        assert len(purpose) <= 24
        self._posts[self._rank], self._put = self._put, b""
        self._barrier.wait()
        far = (rank for rank in self._posts if rank not in self.hosts[self.host])
        self._came = {rank: self._posts[rank] for rank in far if self._posts[rank]}
        self._barrier.wait()
        return True

    def attached(self):
        return self._came


def predicted(num_samples):
    generator = torch.Generator().manual_seed(0)
    return {
        "logits": torch.randn(num_samples, 3, generator=generator),
        "half": torch.randn(num_samples, generator=generator).bfloat16(),
        "label": torch.arange(num_samples) % 5 == 0,
        "nothing": torch.zeros(num_samples, 0),
    }


def file_of(output):
    layout, num_bytes = layout_of(output, len(output["logits"]))
    fd = create_memory("predictions", num_bytes)
    rows = Rows(fd, layout, is_private=False)
    os.close(fd)
    return rows


@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
@pytest.mark.parametrize("hosts", [[(0, 1), (2,)], [(0,), (1,), (2, 3)], [(0, 1)]], ids=str)
@pytest.mark.parametrize("num_samples", [1, 2, 23])
def test_each_host_gets_the_rows_of_all(hosts, num_samples, chunk):
    whole, shards = predicted(num_samples), 5
    plan = SamplePlan(num_samples, 2 * shards, shards, shuffle=False, in_blocks=True)
    host_of = {shard: shard % len(hosts) for shard in range(shards)}
    files = [file_of(whole) for _ in hosts]
    for shard, host in host_of.items():
        own = plan.positions(shard)
        files[host].write(own, {name: tensor[own] for name, tensor in whole.items()})
    ranks = [rank for ranks in hosts for rank in ranks]
    barrier, posts = threading.Barrier(len(ranks), timeout=20), {}

    def share(rank):
        team = FakeTeam(rank, hosts, barrier, posts)
        share_rows(files[team.host], team, host_of, plan, chunk)

    assert in_threads(len(ranks), share) == [None] * len(ranks)
    for rows in files:
        for name, tensor in whole.items():
            assert torch.equal(rows.tensors[name], tensor), name


def test_other_rows_are_refused():
    rows = predicted(4)
    others = rows | {"logits": torch.zeros(4, 2)}
    with pytest.raises(ValueError, match="must have the same names, dtypes and shapes"):
        file_of(rows).take(torch.arange(4), file_of(others).read(torch.arange(4)))
