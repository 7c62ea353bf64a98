"""`unisono.tools.cli.hosts_rendezvous`: which hosts start together, and what is refused.

Hosts look in turn, so a test says how often each looks; no time passes.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.promises import promise

from unisono.errors import RendezvousError
from unisono.runtime.workers.job_store import listen
from unisono.tools.cli.endings import NumHosts, SeveralHosts
from unisono.tools.cli.hosts_rendezvous import (
    LOST_AFTER,
    OTHERS_MAY_COME,
    Entry,
    HostsRendezvous,
    HostsStart,
    reach,
    serve,
)
from unisono.tools.cli.several_hosts import read_hosts

HERE = "127.0.0.1"


class Hosts:
    """Hosts that meet in one store. Final."""

    def __init__(self, nnodes: str, name: str = "") -> None:
        self.store = dist.HashStore()
        self._nnodes, self._name, self._num_processes = NumHosts.read(nnodes), name, 0

    def arrive(self, number: int, process: str = "") -> HostsRendezvous:
        self._num_processes += 1
        me = Entry(number, process or f"process {self._num_processes}", number + 1)
        place = f"{HERE}:1{self._name and f'/{self._name}'}"
        return HostsRendezvous(self.store, SeveralHosts(self._nnodes, number, place), me)

    def write(self, key: str, value: Any) -> None:
        dist.PrefixStore("hosts of ", self.store).set(key, value)


def looks(hosts: Sequence[HostsRendezvous], number: int = 3) -> list[HostsStart | None]:
    """Have each look so often; gives what each sees last."""
    for _ in range(number):
        seen = [host.look() for host in hosts]
    return seen


def started(hosts: Sequence[HostsRendezvous], number: int = 6) -> list[HostsStart]:
    """Have each look so often at most; gives their starts, which must be one."""
    seen = next(seen for seen in (looks(hosts, 1) for _ in range(number)) if None not in seen)
    assert [start.index for start in seen] == list(range(len(hosts)))
    assert len({(start.round, start.token) for start in seen}) == 1
    return seen


def numbers(start: HostsStart) -> list[int]:
    return [entry.number for entry in start.entries]


def test_all_hosts_start_together_in_the_order_of_their_numbers() -> None:
    hosts = Hosts("3")
    others = [hosts.arrive(number) for number in (2, 0)]
    assert looks(others, 2 * OTHERS_MAY_COME) == [None, None]
    two, zero = others
    start, *_ = started([zero, hosts.arrive(1), two], 4)
    assert [(entry.number, entry.workers) for entry in start.entries] == [(0, 1), (1, 2), (2, 3)]


def test_as_many_as_must_be_there_start_after_a_while() -> None:
    hosts = Hosts("2:3")
    there = [hosts.arrive(number) for number in (0, 2)]
    assert looks(there, OTHERS_MAY_COME) == [None, None]
    assert numbers(started(there)[0]) == [0, 2]


def test_a_host_that_comes_later_has_all_begin_again() -> None:
    hosts = Hosts("2:3")
    there = [hosts.arrive(number) for number in (0, 1)]
    first, *_ = started(there, OTHERS_MAY_COME + 4)
    assert not there[0].is_over(first)
    late = hosts.arrive(2)
    assert looks([late]) == [None]
    assert all(host.is_over(first) and host.has_newcomer(first) for host in there)
    start, *_ = started([*there, late])
    assert (start.round, numbers(start)) == (1, [0, 1, 2])
    assert start.token != first.token


def test_a_host_that_begins_again_is_no_newcomer() -> None:
    hosts = Hosts("2")
    there = [hosts.arrive(number) for number in (0, 1)]
    start, *_ = started(there)
    there[1].begin_again(start.round)
    looks(there[1:])
    assert there[0].is_over(start)
    assert not there[0].has_newcomer(start)
    assert started(there)[0].round == 1


def test_a_host_that_is_lost_while_others_come_is_left_out() -> None:
    hosts = Hosts("2:3")
    zero, one, lost = (hosts.arrive(number) for number in range(3))
    looks([lost], 1)
    assert looks([zero], LOST_AFTER + 9) == [None]
    assert numbers(started([zero, one], OTHERS_MAY_COME + 4)[0]) == [0, 1]
    looks([lost])  # it was only stopped
    assert numbers(started([zero, one, lost])[0]) == [0, 1, 2]


def test_a_host_that_writes_its_checkpoint_for_long_is_waited_for() -> None:
    hosts = Hosts("1:2")
    there = [hosts.arrive(number) for number in (0, 1)]
    start, *_ = started(there)
    there[0].begin_again(start.round)
    for _ in range(2 * LOST_AFTER):
        there[1].beat()
        assert there[0].look() is None
    assert started(there)[0].round == 1
    there[0].begin_again(1)
    there[1].leave()
    assert numbers(started(there[:1], OTHERS_MAY_COME + 4)[0]) == [0]


def test_another_process_takes_the_place_of_a_lost_host() -> None:
    hosts = Hosts("2")
    zero, one = (hosts.arrive(number) for number in (0, 1))
    looks([one], 1)
    again = hosts.arrive(1)
    assert looks([again], LOST_AFTER - 1) == [None]
    start, *_ = started([zero, again])
    assert start.entries[1].process == "process 3"
    # The same where hosts run: nobody else has noticed the loss yet.
    third = hosts.arrive(1)
    assert looks([third], LOST_AFTER - 1) == [None]
    assert not zero.is_over(start)
    looks([third])
    assert zero.has_newcomer(start)
    assert started([zero, third])[0].entries[1].process == "process 4"


@pytest.mark.parametrize("runs", [False, True])
def test_two_hosts_of_one_number_are_refused(runs: bool) -> None:
    hosts = Hosts("2")
    there = [hosts.arrive(number) for number in (0, 1)[: 1 + runs]]
    looks(there)
    other = hosts.arrive(0)
    with pytest.raises(RendezvousError, match="has 0, too: number them from 0"):
        looks([*there, other])
    assert all(looks(there)) is runs  # they are not disturbed


def test_a_host_that_connects_anew_begins_again_at_once() -> None:
    hosts = Hosts("2")
    there = [hosts.arrive(number, f"of {number}") for number in (0, 1)]
    start, *_ = started(there)
    again = hosts.arrive(1, "of 1")
    looks([again])
    assert there[0].is_over(start)
    assert started([there[0], again])[0].round == 1


def test_the_status_that_ends_the_run_is_the_first_one() -> None:
    hosts = Hosts("2")
    zero, one = (hosts.arrive(number) for number in (0, 1))
    looks([zero, one])
    assert one.ended() is None
    one.end(5)
    zero.end(0)
    assert (zero.ended(), one.ended()) == (5, 5)
    assert zero.is_needed()
    one.leave()
    assert not zero.is_needed()
    hosts.write("ended", "-7000")
    assert zero.ended() == 0


def test_hosts_must_agree_on_their_number_except_in_another_run() -> None:
    hosts, more = Hosts("2"), Hosts("1:2")
    more.store = hosts.store
    hosts.arrive(0)
    with pytest.raises(RendezvousError, match="is 1:2 here and '2' on one that arrived earlier"):
        more.arrive(1)
    other = Hosts("1:2", "other")
    other.store = hosts.store
    other.arrive(0)


def test_jobs_of_a_cluster_do_not_meet_at_a_port_that_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
    step |= {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    runs = []
    for job, task in (("7", "0"), ("7", "1"), ("8", "1")):
        own = {"SLURM_JOB_ID": job, "SLURM_PROCID": task, "SLURM_NODEID": task}
        for name, value in (step | own).items():
            monkeypatch.setenv(name, value)
        hosts = read_hosts(None, None, None)
        assert hosts is not None
        runs.append(hosts.run)
    assert runs[0] == runs[1] != runs[2]


class MakesFolder:
    """Read from a pickle, it makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@promise("open-ports.5")
@pytest.mark.parametrize("key", ["round", "0 with 1", "closed 0", "ended"])
def test_a_stranger_in_the_store_runs_nothing(tmp_path: Path, key: str) -> None:
    folder = tmp_path / "made"
    harmful = pickle.dumps(MakesFolder(str(folder)))
    entry = json.dumps({"number": "x", "process": [], "workers": 1})
    for found in (harmful, b"no JSON", b'"x"', b"[" * 100_000, entry):
        hosts = Hosts("2")
        zero, one = (hosts.arrive(number) for number in (0, 1))
        looks([zero])
        hosts.write(key, found)
        with pytest.raises(RendezvousError, match="others have written there"):
            one.ended()
            looks([one])
    assert not folder.exists()
    pickle.loads(harmful)
    assert folder.exists()


def test_a_store_listens_at_its_address_alone() -> None:
    port = (store := serve(listen(HERE, 0))).port
    socket.create_connection((HERE, port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    assert reach(HERE, port).check(["nothing"]) is store.check(["nothing"]) is False
