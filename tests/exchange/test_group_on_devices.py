"""The group exchange on the test accelerator, with a group that only looks like NCCL's.

Streams order what follows. The accelerator raises where one of two operations on the same bytes is
not ordered after the other.
"""

import pytest
import torch
from tests.exchange import test_contract
from tests.exchange.fake_hosts import HostsJob
from tests.exchange.fake_nccl import FakeNccl
from tests.exchange.test_contract import adam, check, normed, on_devices, train
from tests.workers.desk import Death, Job

from unisono.engine.exchange import nccl_communicator
from unisono.engine.exchange.group_exchange import GroupExchange
from unisono.engine.exchange.hosts_exchange import GroupHostsExchange
from unisono.engine.exchange.nccl_communicator import NcclCommunicator
from unisono.runtime.device import Device


class AsWithNccl(GroupExchange):
    def _connect(self):
        return NcclCommunicator(self._team, self.device.torch, FakeNccl)


class AsWithNcclOnHosts(GroupHostsExchange):
    _connect = AsWithNccl._connect


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
    test_contract.expected(optimizer, 8)
    monkeypatch.setattr(test_contract, "gradients_of", on_devices)
    job = (HostsJob if cls is AsWithNcclOnHosts else Job)(control_of(world_size), deaths)

    def work(team):
        return train(team, cls, optimizer, 8, Device(torch.device("sim", team.world.rank)))

    results = job.run(work)
    assert len(results) == world_size - len(deaths)
    check(results, optimizer, 8)
