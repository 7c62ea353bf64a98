"""Replicas on several hosts: what their devices have computed leaves while the rest is computed."""

import pytest
import torch
from tests.exchange import test_contract
from tests.exchange.fake_hosts import HostsJob
from tests.exchange.test_contract import (
    changes_in_place,
    check_changed,
    comes_twice,
    gradients_of,
    is_replaced,
    is_taken_away,
    sums_of_what_changes,
)
from tests.workers.test_barrier import control_of  # noqa: F401

from unisono.device import Device
from unisono.exchange import host_crossing, staged
from unisono.exchange.staged_hosts import StagedHostsExchange


@pytest.mark.parametrize(
    ("how", "only_rank"),
    [(comes_twice, None), (is_replaced, 1), (changes_in_place, None), (is_taken_away, 1)],
)
def test_what_leaves_a_device_early_does_not_count_if_it_changes(
    accelerator,
    monkeypatch,
    control_of,  # noqa: F811
    how,
    only_rank,
):
    """And it does leave: all buckets are waited for, on their way to the other host."""
    monkeypatch.setattr(staged, "BUCKET_BYTES", 512)
    monkeypatch.setattr(host_crossing, "_SLICE_BYTES", 1024)
    torch.ones(1, device="sim", requires_grad=True).sum().backward()

    def work(team):
        device = Device(torch.device("sim", team.world.rank))
        return sums_of_what_changes(team, StagedHostsExchange, how, only_rank, device)

    def on_devices(shard, step):
        there = f"sim:{torch.accelerator.current_device_index()}"
        return [one if one is None else one.to(there) for one in gradients_of(shard, step)]

    with monkeypatch.context() as patch:
        patch.setattr(test_contract, "gradients_of", on_devices)
        results = HostsJob(control_of(2)).run(work)
    check_changed(results, how, only_rank)
