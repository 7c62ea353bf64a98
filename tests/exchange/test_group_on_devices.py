"""The group exchange on the test accelerator, with a group that only looks like NCCL's.

Streams order what follows. The accelerator raises where one of two operations on the same bytes is
not ordered after the other.
"""

import pytest
import torch
from tests.exchange import test_contract
from tests.exchange.fake_hosts import HostsJob
from tests.exchange.fake_nccl import FakeNccl
from tests.exchange.test_contract import (
    STEPS,
    adam,
    expected,
    gradients_of,
    normed,
    same_bits,
    snapshot,
    take_step,
)
from tests.workers.desk import Death, Job

from unisono.engine.exchange import nccl_communicator
from unisono.engine.exchange.group_exchange import GroupExchange
from unisono.engine.exchange.hosts_exchange import GroupHostsExchange
from unisono.engine.exchange.nccl_communicator import NcclCommunicator
from unisono.engine.state.contents import digest_of, place
from unisono.runtime.device import Device, on_host


class AsWithNccl(GroupExchange):
    def _connect(self):
        return NcclCommunicator(self._team, self.device.torch, FakeNccl)


class AsWithNcclOnHosts(GroupHostsExchange):
    _connect = AsWithNccl._connect


def train(team, cls, optimizer, num_shards):
    device = Device(torch.device("sim", team.world.rank))
    model, updates = test_contract.make(optimizer)
    place(model, updates, device)
    exchange = cls(model, updates, shards=num_shards, team=team, device=device, new_key=1)
    seen, step = [], 0
    snapshot(exchange, team, 0, updates)
    while step < STEPS:
        seen.append(
            [on_host(g) if g is not None else None for g in take_step(exchange, updates, step)]
        )
        step += 1
    exchange.unbind()
    return seen, digest_of(model, updates)


def on_devices(shard, step):
    device = torch.accelerator.current_device_index()
    return [g if g is None else g.to(f"sim:{device}") for g in gradients_of(shard, step)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "cls", "world_size", "deaths"),
    [
        (optimizer, *case)
        for optimizer in (adam, normed)
        for case in (
            (AsWithNccl, 1, ()),
            (AsWithNccl, 2, ()),
            (AsWithNccl, 3, (Death(1, 9, "before"),)),
            (AsWithNcclOnHosts, 3, ()),
        )
    ],
)
def test_bits_are_those_of_cpus(
    accelerator, monkeypatch, control_of, optimizer, cls, world_size, deaths
):
    settings = {**nccl_communicator._ENVIRONMENT, "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in settings.items():  # workers are threads here
        monkeypatch.setenv(name, value)
    sums, digest = expected(optimizer, 8)
    monkeypatch.setattr(test_contract, "gradients_of", on_devices)
    job = (HostsJob if cls is AsWithNcclOnHosts else Job)(control_of(world_size), deaths)
    results = job.run(lambda team: train(team, cls, optimizer, 8))
    assert len(results) == world_size - len(deaths)
    for rank, result in results.items():
        assert not isinstance(result, BaseException), (rank, result)
        for found, there in zip(result[0], sums, strict=True):
            assert all(map(same_bits, found, there)), rank
        assert result[1] == digest, rank
