"""Replicas on several hosts: what their devices have computed leaves while the rest is computed."""

import pytest
import torch
from tests.exchange import test_contract
from tests.exchange.fake_hosts import HostsJob
from tests.exchange.test_contract import (
    STAGED,
    adam,
    bound,
    changes_in_place,
    check_changed,
    comes_twice,
    is_replaced,
    is_taken_away,
    on_devices,
    sums_of_what_changes,
)

from unisono.engine.exchange import host_memory, lanes
from unisono.runtime.device import Device


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(host_memory, "BUCKET_BYTES", 512)
    monkeypatch.setattr(lanes, "_SLICE_BYTES", 1024)


@pytest.mark.parametrize(
    ("how", "only_rank"),
    [(comes_twice, None), (is_replaced, 1), (changes_in_place, None), (is_taken_away, 1)],
)
def test_what_leaves_a_device_early_does_not_count_if_it_changes(
    accelerator, monkeypatch, control_of, how, only_rank
):
    """And it does leave: all buckets are waited for, on their way to the other host."""

    def work(team):
        device = Device(torch.device("sim", team.world.rank))
        return sums_of_what_changes(team, STAGED, how, only_rank, device)

    with monkeypatch.context() as patch:
        patch.setattr(test_contract, "gradients_of", on_devices)
        results = HostsJob(control_of(2)).run(work)
    check_changed(results, how, only_rank)


def test_a_worker_without_a_lane_counts_nothing_of_the_step_before(accelerator, control_of):
    def work(team):
        device = Device(torch.device("sim", team.world.rank))
        _, _, exchange = bound(team, STAGED, adam, 3, device)
        are_all_there = []
        for _ in range(3):
            part = exchange.division.mine[0]
            gradients = on_devices(part.lo % 2, 1)  # all parameters have one
            for index in reversed(range(len(gradients))):
                exchange.publish_early(part, index, gradients[index])
                are_all_there.append(index > 0 and exchange._between.ready.has_all)
            exchange.publish(part, gradients)
            assert exchange.gather("gradients") is None
            exchange.add_up("sums")
        exchange.unbind()
        return are_all_there

    results = HostsJob(control_of(3), ranks_of_host=((0,), (1, 2))).run(work)
    for rank, result in results.items():
        assert not isinstance(result, BaseException), (rank, result)
        assert not any(result), rank
