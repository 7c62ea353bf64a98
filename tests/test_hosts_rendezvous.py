"""`unisono.tools.cli.hosts_rendezvous`: where a rendezvous of hosts listens, and what it reads."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from tests.promises import promise
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from unisono.tools.cli.endings import NumHosts
from unisono.tools.cli.hosts_rendezvous import HostsBackend, NumHostsError, meet_hosts

KEY = "torch.rendezvous.unisono"


class MakesFolder:
    """Read from a pickle, it makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def backend_at(store: dist.Store) -> HostsBackend:
    return HostsBackend(C10dRendezvousBackend(store, "unisono"))


def a_state() -> _RendezvousState:
    state = _RendezvousState()
    here, there = _NodeDesc("10.0.0.1", 7, 0), _NodeDesc("10.0.0.2", 8, 0)
    state.participants, state.wait_list = {here: 0}, {there}
    state.last_heartbeats, state.deadline = {here: datetime.now(UTC)}, datetime.now(UTC)
    return state


def test_states_of_torch_are_read_as_they_are() -> None:
    backend = backend_at(dist.HashStore())
    assert backend.get_state() is None
    written = a_state()
    read, token, is_set = backend.set_state(pickle.dumps(written))
    assert is_set
    assert backend.get_state() == (read, token)
    written.last_heartbeats = pickle.loads(read).last_heartbeats
    assert vars(pickle.loads(read)) == vars(written)


def test_a_heartbeat_counts_from_when_it_is_seen() -> None:
    # Two hosts whose clocks differ by an hour, and a third, which has gone.
    store = dist.HashStore()
    here, there, gone = (_NodeDesc(f"10.0.0.{number}", 7, 0) for number in (1, 2, 3))
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    one, other = backend_at(store), backend_at(store)

    def beat(backend: HostsBackend, node: _NodeDesc, time: datetime) -> dict[Any, datetime]:
        found = backend.get_state()
        state, token = found or (pickle.dumps(_RendezvousState()), None)
        read = pickle.loads(state)
        read.last_heartbeats[node] = time
        state, _, is_set = backend.set_state(pickle.dumps(read), token)
        assert is_set
        return pickle.loads(state).last_heartbeats

    begun = datetime.now(UTC)
    beat(other, gone, hour_ago)
    seen_first = beat(one, here, datetime.now(UTC))[gone]
    for seconds in range(3):
        of_other = beat(other, there, hour_ago + timedelta(seconds=seconds))
        assert of_other[there] > of_other[gone] >= begun
        of_one = beat(one, here, datetime.now(UTC))
        assert of_one[there] > of_one[gone] == seen_first >= begun


@promise("open-ports.5")
def test_a_pickle_in_the_store_runs_nothing(tmp_path: Path) -> None:
    store = dist.HashStore()
    backend = backend_at(store)
    folder, state = tmp_path / "made", a_state()
    state.participants = {MakesFolder(str(folder)): 0}  # type: ignore[dict-item]
    harmful = pickle.dumps(state)
    for found in (harmful, b"no pickle", b"5", b"{}", b"[" * 100_000, b'{"round": "x"}'):
        store.set(KEY, b64encode(found).decode())
        with pytest.raises(RendezvousStateError, match="others have written there"):
            backend.get_state()
        with pytest.raises(RendezvousStateError):
            backend.set_state(pickle.dumps(a_state()), b"another token")
    assert not folder.exists()
    pickle.loads(harmful)
    assert folder.exists()  # as torch would have


def test_it_listens_at_its_address_alone() -> None:
    handler = meet_hosts(("127.0.0.1", 0), NumHosts(2, 2), address="127.0.0.1", is_first=True)
    port = handler._store.port
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    with pytest.raises(RendezvousConnectionError, match="in use"):
        meet_hosts(("127.0.0.1", port), NumHosts(2, 2), address="127.0.0.1", is_first=True)
    with pytest.raises(NumHostsError, match="is 1:2 here and '2' on one that arrived earlier"):
        meet_hosts(("127.0.0.1", port), NumHosts(1, 2), address="127.0.0.1", is_first=False)
    other = {"address": "127.0.0.1", "is_first": False, "name": "other"}
    meet_hosts(("127.0.0.1", port), NumHosts(1, 2), **other)  # another run
    workers = handler._create_tcp_store_server("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", workers.port))


@pytest.mark.slow
@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_host_that_waits_too_long_for_others_ends_with_1(node_rank: int) -> None:
    addresses = [one.address for all_of in psutil.net_if_addrs().values() for one in all_of]
    beyond = [address for address in addresses if address.count(".") == 3 and address[:4] != "127."]
    if not beyond:
        pytest.skip("no address that others could reach")
    with socket.create_server((beyond[0], 0)) as free:
        place = f"{beyond[0]}:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "unisono", "run", "-n", "1", "--nnodes", "2"]
    command += ["--node-rank", str(node_rank), "--rendezvous", place, __file__]
    environ = os.environ | {"UNISONO_RENDEZVOUS_TIMEOUT": "0.5"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert f"{place} within 0.5 s, but " in done.stderr
    assert done.returncode == 1, done
