"""Groups of gloo: what becomes of its words, and of a group that only some workers can make."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.exchange.test_contract import GROUP, adam, check, train
from tests.workers.fake_launcher import Job

from unisono.engine.exchange import gloo_communicator
from unisono.engine.exchange.communicator import BrokenError
from unisono.engine.exchange.gloo_communicator import GlooCommunicator, GlooTransfer
from unisono.errors import UnisonoError


class Work:
    """A call that has ended while gloo was saying that its time is over."""

    def __init__(self, failure: str = "") -> None:
        self.failure = failure

    def wait(self, timeout=None):
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)

    def is_completed(self):
        return True


def waiting(work: Work) -> bool:
    communicator = object.__new__(GlooCommunicator)
    communicator._team, communicator._groups = SimpleNamespace(has_lost=False), []
    communicator._under_way = []
    return communicator.wait(GlooTransfer(work))


def test_a_transfer_that_ends_while_it_is_looked_at_has_arrived() -> None:
    assert waiting(Work())


def test_what_has_failed_is_told_instead_of_the_time() -> None:
    with pytest.raises(BrokenError, match="reset by peer"):
        waiting(Work("Connection reset by peer"))


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
    results = Job(control_of(3)).run(lambda team: train(team, GROUP, adam, 8))
    assert len(made) > 1 + failing
    check(results, adam, 8)


def test_who_cannot_connect_is_told_the_way_out(control_of, monkeypatch):
    class Group(gloo_communicator.ProcessGroupGloo):
        def __init__(self, *arguments):
            raise RuntimeError("no such interface")

    monkeypatch.setattr(gloo_communicator, "ProcessGroupGloo", Group)
    results = Job(control_of(2)).run(lambda team: train(team, GROUP, adam, 8))
    for result in results.values():
        assert isinstance(result, UnisonoError)
        assert "no such interface on rank 0): leave UNISONO_EXCHANGE out" in str(result)
