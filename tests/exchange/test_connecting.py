"""A group that only some workers could make: all try again, and none waits for another meeting."""

import pytest
from tests.exchange.test_contract import adam, check, train
from tests.workers.desk import Job

from unisono.engine.exchange import gloo_communicator
from unisono.engine.exchange.group_exchange import GroupExchange


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
