"""Links between hosts, here between threads: frames arrive whole, and strangers are turned away."""

import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tests.promises import promise
from torch._C._distributed_c10d import HashStore

from unisono.errors import PeerLostError, RendezvousError
from unisono.runtime.procfs import create_memory
from unisono.runtime.workers import host_links, interfaces
from unisono.runtime.workers.control_block import control_block_bytes
from unisono.runtime.workers.external import ExternallyLaunched
from unisono.runtime.workers.host_links import connect_hosts
from unisono.runtime.workers.hosts_control_block import HostsControlBlock
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.rendezvous import RankPlaces, Rendezvous
from unisono.runtime.workers.team import Team
from unisono.runtime.world import World
from unisono.training.fit import FitUnderWay

HERE = "127.0.0.1"


def rendezvous_of(store, rank, ranks_of_host):
    return Rendezvous(store, RankPlaces(rank, ranks_of_host), lambda rank: False)


@contextlib.contextmanager
def connected(ranks_of_host, here=HERE):
    """The links of each rank, until the block ends."""
    store = HashStore()
    ranks = [rank for ranks in ranks_of_host for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        meet = [rendezvous_of(store, rank, ranks_of_host) for rank in ranks]
        links = list(pool.map(lambda one: connect_hosts(one, here), meet))
    try:
        yield links
    finally:
        for link in links:
            link.close()


def received(links, number):
    heard = []
    while len(heard) < number:
        heard += links.receive(5.0)
    return heard


@pytest.mark.parametrize("here", [HERE, "::1"])
def test_frames_come_whole_and_in_order_from_every_worker_of_other_hosts(here):
    if not any(here in addresses for addresses in interfaces._addresses().values()):
        pytest.skip("this machine has no IPv6")
    with connected(((0, 1), (2,)), here) as (a, b, c):
        a.send(b"")
        a.send(b"x" * 300_000)
        b.send(b"from 1")
        heard = received(c, 3)
        assert [said for rank, said in heard if rank == 0] == [b"", b"x" * 300_000]
        assert [said for rank, said in heard if rank == 1] == [b"from 1"]
        c.send(b"back")
        assert received(a, 1) == received(b, 1) == [(2, b"back")]


def test_the_end_of_a_process_comes_after_its_last_word():
    with connected(((0,), (1,))) as (a, b):
        a.send(b"last")
        a.close()
        assert received(b, 2) == [(0, b"last"), (0, Departure.DIED)]


@promise("open-ports.5")
@pytest.mark.timeout(30)
def test_who_does_not_know_the_token_is_turned_away_and_keeps_nobody_waiting(monkeypatch):
    """Of many that say nothing, or half, the oldest are closed; all of them when it is over."""
    monkeypatch.setattr(host_links, "_CALLERS_AT_MOST", 8)
    store = HashStore()
    first, second = (rendezvous_of(store, rank, ((0,), (1,))) for rank in range(2))
    strangers = []
    gather = second.gather

    def let_strangers_knock(what, mine):
        places = gather(what, mine)
        for number in range(12):
            strangers.append(socket.create_connection(places[0][1], 5.0))
            strangers[-1].sendall(b"\1\0\0"[: number % 4])
        with socket.create_connection(places[0][1], 5.0) as stranger:
            stranger.sendall(b"\1\0\0\0" + bytes(32))
            assert stranger.recv(100) == b""
        return places

    second.gather = let_strangers_knock
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda one: connect_hosts(one, HERE), (first, second)))
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    links[0].send(b"hello")
    assert received(links[1], 1) == [(0, b"hello")]
    for link in links:
        link.close()


def test_hosts_with_another_version_are_refused():
    meet = rendezvous_of(HashStore(), 0, ((0,), (1,)))
    meet.gather = lambda what, mine: [mine, ["0.0.1", [HERE, 1]]]
    with pytest.raises(RendezvousError, match=r"but rank 0 has .* and rank 1 has 0\.0\.1: install"):
        connect_hosts(meet, HERE)


def test_who_is_not_reached_and_who_is_turned_away_say_so(monkeypatch):
    monkeypatch.setenv("UNISONO_RENDEZVOUS_TIMEOUT", "0.5")
    store = HashStore()
    first, second = (rendezvous_of(store, rank, ((0,), (1,))) for rank in range(2))
    second.token = "another"
    with ThreadPoolExecutor(2) as pool:
        waiting, turned_away = (pool.submit(connect_hosts, one, HERE) for one in (first, second))
        with pytest.raises(RendezvousError, match=r"but ranks \[1\] have not reached rank 0"):
            waiting.result()
        with pytest.raises(RendezvousError, match="rank 1 does not reach rank 0 at"):
            turned_away.result()


@contextlib.contextmanager
def team_of_hosts(ranks_of_host):
    """A team of threads whose hosts have control blocks of their own."""
    world_size, teams = sum(map(len, ranks_of_host)), []
    sizes = [control_block_bytes(len(ranks)) for ranks in ranks_of_host]
    blocks = [create_memory("control", size) for size in sizes]
    with connected(ranks_of_host) as links, contextlib.ExitStack() as stack:
        for fd in blocks:
            stack.callback(os.close, fd)
        for rank, link in enumerate(links):
            places = RankPlaces(rank, ranks_of_host)
            here = places.local_ranks
            fd = blocks[ranks_of_host.index(here)]
            control = HostsControlBlock(fd, places, are_replaced=True)
            control.connect(link)
            control.take_seat(rank)
            world = World(rank, world_size, here.index(rank), len(here))
            teams.append(Team(ExternallyLaunched(world, control, ranks_of_host)))
        yield teams


def on_all(teams, act):
    with ThreadPoolExecutor(len(teams)) as pool:
        return list(pool.map(act, teams))


@pytest.mark.slow
def test_workers_of_all_hosts_hear_each_other():
    with team_of_hosts(((0, 1), (2,), (3, 4))) as teams:
        assert [team.neighbours for team in teams][::2] == [(0, 1), (2,), (3, 4)]
        assert [team.leads_host for team in teams] == [True, False, True, True, False]
        long = b"x" * 200_000

        def talk(team):
            heard = team.gather(long + bytes([team.world.rank]), "talk")
            votes = [team.vote(10 * n + team.world.rank, "vote") for n in range(5)]
            beside = []
            for n in range(5):
                team.attach(f"{n} of {team.world.rank}".encode())
                team.meet("beside")
                beside.append(team.attached())
            return heard, votes, beside

        for team, (heard, votes, beside) in zip(teams, on_all(teams, talk), strict=True):
            assert heard == {rank: long + bytes([rank]) for rank in range(5)}
            assert votes == [{rank: 10 * n + rank for rank in range(5)} for n in range(5)]
            far = [rank for rank in range(5) if rank not in team.neighbours]
            assert [set(one) for one in beside] == [set(far)] * 5
            fit = SimpleNamespace(_context=SimpleNamespace(team=team))
            assert [rank for rank in range(5) if FitUnderWay.pid(fit, rank) is None] == far
            assert all(
                one[rank] == f"{n} of {rank}".encode()
                for n, one in enumerate(beside)
                for rank in far
            )


def test_a_worker_of_another_host_that_has_ended_is_named():
    with team_of_hosts(((0, 1), (2, 3))) as teams:
        on_all(teams, lambda team: team.meet("first"))
        control = teams[2].supervisor.control
        control.leave(2, Departure.FAILED)

        def miss(team):
            with pytest.raises(PeerLostError, match="rank 2 has failed") as caught:
                team.meet("second")
            return caught.value.rank

        assert on_all([teams[0], teams[1], teams[3]], miss) == [2, 2, 2]
