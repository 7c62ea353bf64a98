"""Whether the launchers of other hosts are alive, here sockets of this process."""

import pytest
from torch._C._distributed_c10d import HashStore

from unisono.runtime.launch.job import ADDRESS, reserved_port
from unisono.runtime.workers.host_member import Launchers
from unisono.runtime.workers.rendezvous import RankPlaces


@pytest.fixture
def hosts():
    """The port that host 1's launcher has reserved, and what workers of both hosts know of it."""
    store = HashStore()
    port = reserved_port()
    seen = [Launchers(store, RankPlaces.of(rank, ["a", "b"])) for rank in range(2)]
    yield port, *seen
    seen[0].leave()
    port.close()


def test_a_launcher_that_nobody_has_published_may_still_come(hosts):
    _, here, _ = hosts
    assert not here.answers(1)
    assert not here.is_gone(1)


def test_a_launcher_answers_without_a_word_from_its_first_start_again_to_its_end(hosts):
    port, here, there = hosts
    there.publish(ADDRESS, port.getsockname()[1])
    assert not here.answers(1)
    assert not here.is_gone(1)  # its host is there, and it has lost no worker
    port.listen()
    assert [here.answers(1) for _ in range(3)] == [True] * 3
    assert not here.is_gone(1)
    port.close()
    while not here.is_gone(1):
        continue
    assert not here.answers(1)


def test_a_host_that_cannot_be_reached_is_gone_after_a_while(hosts, monkeypatch):
    port, here, there = hosts
    there.publish(ADDRESS, port.getsockname()[1])
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])

    def unreachable(place, timeout_s):
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", unreachable)
    assert not here.is_gone(1)
    now_s[0] = 9.0
    assert here.is_gone(1)
