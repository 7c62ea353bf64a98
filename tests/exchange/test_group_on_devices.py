"""The group exchange on the test accelerator, with a group that only looks like NCCL's.

Streams order what follows. The accelerator raises where one of two operations on the same bytes is
not ordered after the other.
"""

from functools import partial

import pytest
import torch
from tests.exchange import test_contract
from tests.exchange.fake_hosts import HostsJob
from tests.exchange.fake_nccl import FakeNccl
from tests.exchange.test_contract import adam, check, normed, on_devices, train
from tests.workers.fake_launcher import Death, Job

from unisono.engine.exchange import nccl_communicator
from unisono.engine.exchange.exchange import ExchangeKind
from unisono.engine.exchange.group_carriage import GroupCarriage
from unisono.engine.exchange.nccl_communicator import NcclCommunicator
from unisono.engine.exchange.replicas import Replicas
from unisono.runtime.device import Device


def connect(team, device):
    return NcclCommunicator(team, device.torch, FakeNccl)


AS_WITH_NCCL = ExchangeKind(partial(GroupCarriage, connect=connect), Replicas)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "job", "world_size", "deaths"),
    [
        (optimizer, *case)
        for optimizer in (adam, normed)
        for case in (
            (Job, 1, ()),
            (Job, 2, ()),
            (Job, 3, (Death(1, 9, "before"),)),
            (HostsJob, 3, ()),
        )
    ],
)
def test_bits_are_those_of_cpus(
    accelerator, monkeypatch, control_of, optimizer, job, world_size, deaths
):
    settings = {**nccl_communicator._ENVIRONMENT, "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in settings.items():  # workers are threads here
        monkeypatch.setenv(name, value)
    test_contract.expected(optimizer, 8)
    monkeypatch.setattr(test_contract, "gradients_of", on_devices)

    def work(team):
        return train(team, AS_WITH_NCCL, optimizer, 8, Device(torch.device("sim", team.world.rank)))

    results = job(control_of(world_size), deaths).run(work)
    assert len(results) == world_size - len(deaths)
    check(results, optimizer, 8)
