"""A group that only some workers could make: all try again, and none waits for another meeting."""

import pytest
from tests.exchange.test_contract import adam, check, train
from tests.workers.desk import Job

from unisono.engine.exchange import gloo_communicator
from unisono.engine.exchange.group_exchange import GroupExchange
from unisono.errors import UnisonoError


@pytest.mark.parametrize("failing", [0, 1])  # which of the groups of a communicator
def test_one_worker_may_fail_to_connect(control_of, monkeypatch, failing):
    made = []

    class Group(gloo_communicator.ProcessGroupGloo):
        def __init__(self, store, position, size, options):
            super().__init__(store, position, size, options)
            if position == 0:
                made.append(position)
                if len(made) == 1 + failing:
                    raise RuntimeError("Connection closed by peer")

    # Of the class torch's constructor makes the options, too.
    monkeypatch.setattr(gloo_communicator, "ProcessGroupGloo", Group)
    results = Job(control_of(3)).run(lambda team: train(team, GroupExchange, adam, 8))
    assert len(made) > 1 + failing
    check(results, adam, 8)


def test_who_cannot_connect_is_told_the_way_out(control_of, monkeypatch):
    class Group(gloo_communicator.ProcessGroupGloo):
        def __init__(self, *arguments):
            raise RuntimeError("no such interface")

    monkeypatch.setattr(gloo_communicator, "ProcessGroupGloo", Group)
    results = Job(control_of(2)).run(lambda team: train(team, GroupExchange, adam, 8))
    for result in results.values():
        assert isinstance(result, UnisonoError)
        assert "no such interface on rank 0): leave UNISONO_EXCHANGE out" in str(result)
