"""The communicator of NCCL ends when a member is lost; with a group that only looks like NCCL's."""

import os
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tests.exchange.fake_nccl import FakeNccl
from tests.workers.fake_launcher import Death, Job

from unisono.engine.exchange import nccl_communicator
from unisono.engine.exchange.communicator import BrokenError
from unisono.engine.exchange.nccl_communicator import NcclCommunicator

pytestmark = pytest.mark.slow


@pytest.fixture
def settings_are_there(monkeypatch):
    """Workers are threads here, and C libraries read the environment without Python's lock."""
    for name, value in nccl_communicator._ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def communicator_of(team):
    device = torch.device("sim", team.world.rank)
    return NcclCommunicator(team, device, FakeNccl), device


def all_to_all(team, communicator, device):
    size = team.size
    sent = torch.full((size,), team.position, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    transfer = communicator.all_to_all(received, sent, [1] * size, [1] * size)
    assert communicator.wait(transfer)
    transfer.join()
    return received.tolist()


def test_a_worker_that_is_lost_while_all_connect_holds_nobody_up(
    settings_are_there, accelerator, control_of
):
    def work(team):
        try:
            communicator, device = communicator_of(team)
        except BrokenError:
            communicator, device = communicator_of(team)
        seen = all_to_all(team, communicator, device)
        communicator.close()
        return seen

    for rank in range(3):
        results = Job(control_of(3), [Death(rank, 1, "before")]).run(work)
        assert results == {other: [0, 1] for other in range(3) if other != rank}


class Never:
    def query(self):
        return False


def test_what_does_not_come_in_time_is_given_up(accelerator, monkeypatch, control_of):
    monkeypatch.setattr(nccl_communicator, "_TIMEOUT_S", 0.05)

    def work(team):
        communicator, device = communicator_of(team)
        sent = torch.zeros(1, dtype=torch.uint8, device=device)
        transfer = communicator.all_gather(torch.zeros_like(sent), sent)
        communicator.aside = nullcontext
        communicator._stream = SimpleNamespace(record_event=Never)
        assert not communicator.wait(transfer, patience_s=0.01)
        assert not communicator._is_aborted.is_set()
        with pytest.raises(BrokenError, match="bytes of another worker did not come"):
            communicator.wait(transfer)
        with pytest.raises(BrokenError):
            communicator.all_gather(torch.zeros_like(sent), sent)
        communicator.close()
        return communicator._group.num_aborts

    assert Job(control_of(1)).run(work) == {0: 1}


def test_settings_hold_while_the_group_is_made_and_no_longer(accelerator, monkeypatch, control_of):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    before, seen = dict(os.environ), []

    def make(*arguments):
        seen.append(dict(os.environ))
        time.sleep(0.01)
        return FakeNccl(*arguments)

    def work(team):
        NcclCommunicator(team, torch.device("sim", 0), make).close()

    Job(control_of(1)).run(work)
    assert seen[0]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert seen[0]["NCCL_SOCKET_IFNAME"] == "lo"
    assert dict(os.environ) == before
