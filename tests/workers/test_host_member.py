"""What a worker of one of several hosts makes of what others leave in the store, or do not."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from unisono.errors import PeerLostError, RendezvousError
from unisono.runtime.workers import launcher_messages as messages
from unisono.runtime.workers.host_member import HostMember
from unisono.runtime.workers.supervisor import LauncherLink


def member(**has: Any) -> Any:
    return SimpleNamespace(world=SimpleNamespace(rank=0), _others=[(1, (2, 3))], **has)


def test_a_loop_that_others_left_within_a_step_has_no_outcome() -> None:
    store = dist.HashStore()
    store.set("outcome 4", "loop\n")
    with pytest.raises(PeerLostError, match="has left this loop within a step"):
        HostMember._outcome(member(_store=store), 4, messages.LOOP)
    store.set("outcome 5", "evaluate\nits means")
    assert HostMember._outcome(member(_store=store), 5, "evaluate") == b"its means"


LOST = PeerLostError("rank 2 was lost, and nobody took its place", rank=2)
LEFT = messages.ReplicatedResult(4, messages.LOOP, b"")
REFUSED = messages.NoRecovery("it left a loop")
SAID = messages.ReplicatedResult(3, "evaluate", b"means")


@pytest.mark.parametrize(("message", "is_sent"), [(LEFT, False), (REFUSED, False), (SAID, True)])
def test_a_worker_that_has_given_up_does_not_say_that_its_loop_has_ended(
    message: Any, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise LOST

    sent, published = [], []
    monkeypatch.setattr(LauncherLink, "notify", lambda self, message: sent.append(message))
    one: Any = object.__new__(HostMember)
    one.control = SimpleNamespace(has_lost=False)
    one._store_request, one._await_launchers = nullcontext, lost
    one._publish_outcome = published.append
    with pytest.raises(PeerLostError):
        one.stopped(7, between_steps=False)
    one.notify(message)
    assert sent == published == ([message] if is_sent else [])


@pytest.mark.parametrize(("is_replacement", "times"), [(False, 1), (True, 5)])
def test_a_worker_that_cannot_be_reached_after_a_restart_is_sought_again(
    is_replacement: bool, times: int
) -> None:
    tries = []

    def meet(index: int, snapshot: int) -> str:
        tries.append(index)
        if len(tries) < times or not is_replacement:
            raise RendezvousError("let the firewall pass it") from TimeoutError()
        return "all"

    one = member(
        is_replacement=is_replacement,
        _store_request=nullcontext,
        _is_over=lambda index: False,
        _meet_in_round=meet,
    )
    if is_replacement:
        assert HostMember._meet(one, 0, 0) == "all"
    else:
        with pytest.raises(RendezvousError):
            HostMember._meet(one, 0, 0)
    assert len(tries) == times
