"""What becomes of gloo's own words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unisono.engine.exchange.communicator import BrokenError
from unisono.engine.exchange.gloo_communicator import GlooCommunicator, GlooTransfer


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
