"""torch's rendezvous, with three differences.

* It listens at one address; torch's listens at all of them.
* torch's state is a pickle in a store that anyone who reaches it can write. Here it is JSON.
* Hosts' clocks may differ; torch considers hosts that are 15 s behind lost.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import secrets
from contextlib import closing
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from typing import Any, final

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousState,
)
from typing_extensions import override

from unisono.runtime.timeouts import RENDEZVOUS
from unisono.runtime.workers.job_store import listen
from unisono.tools.cli.endings import NumHosts

_NAME = "unisono"
_OPERATION_TAKES_AT_MOST = timedelta(seconds=60)
_OTHERS_MAY_COME = timedelta(seconds=10)  # once the least number of hosts is there


class NumHostsError(RendezvousError):
    """Hosts disagree on how many there are."""


def meet_hosts(
    place: tuple[str, int], nnodes: NumHosts, *, address: str, is_first: bool, name: str = ""
) -> DynamicRendezvousHandler:
    """Connect to the rendezvous of the hosts at `place`; on the first host, also serve it.

    The others reach this host at `address`; `name` is the run's, in a store that outlives the run.
    """
    store = _serve(*place) if is_first else _store(*place, is_master=False)
    try:
        told = store.compare_set(f"num_hosts{name}", "", str(nnodes)).decode()
    except (RuntimeError, ValueError) as error:
        raise RendezvousConnectionError(str(error)) from error
    if told != str(nnodes):
        raise NumHostsError(
            f"`--nnodes` must be the same on every host, but is {nnodes} here and {told!r} on one "
            f"that arrived earlier: start this one again with that, or all others."
        )
    join = timedelta(seconds=math.ceil(RENDEZVOUS.in_s()))
    timeout = RendezvousTimeout(join, _OTHERS_MAY_COME)
    backend = HostsBackend(C10dRendezvousBackend(store, _NAME + name))
    handler: DynamicRendezvousHandler = _Handler.from_backend(
        _NAME + name, store, backend, nnodes.least, nnodes.most, address, timeout
    )
    return handler


def _serve(address: str, port: int) -> TCPStore:
    """Return a store that listens at an address of this host."""
    try:
        listening = listen(address, port)
    except OSError as error:
        raise RendezvousConnectionError(str(error)) from error
    with closing(listening):
        port = listening.getsockname()[1]
        return _store(address, port, is_master=True, master_listen_fd=listening.detach())


def _store(address: str, port: int, **options: Any) -> TCPStore:
    options |= {"multi_tenant": True, "timeout": _OPERATION_TAKES_AT_MOST}
    try:
        return TCPStore(address, port, **options)
    except (OSError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error


class _AnyProcess:
    """Names processes uniquely: torch uses process IDs, which containers repeat at each start."""

    def generate(self, local_addr: str | None = None) -> _NodeDesc:
        return _NodeDesc(local_addr or "", os.getpid(), secrets.randbits(62))


class _Handler(DynamicRendezvousHandler):
    """A handler that also serves the store of a job's workers at its host's address."""

    _node_desc_generator = _AnyProcess()  # type: ignore[assignment]

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        # Hosts that were there before would send nothing to those that joined since.
        self._bootstrap_store_info = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return _serve(master_addr, master_port)


@final
class HostsBackend(RendezvousBackend):
    """torch's backend, with JSON in the store, and times in this host's clock.

    A host is lost when its heartbeat is old. Times of another host's clock mean nothing here, so
    torch gets each heartbeat with the time at which this host first saw it.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend
        # Each host's heartbeat, by its own clock and by that of this host.
        self._seen: dict[Any, tuple[datetime, datetime]] = {}

    @property
    @override
    def name(self) -> str:
        return str(self._backend.name)

    @override
    def get_state(self) -> tuple[bytes, Any] | None:
        found = self._backend.get_state()
        return found and (self._as_of_here(found[0]), found[1])

    @override
    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        own = pickle.loads(state)  # of this process
        for node, (told, here) in self._seen.items():
            if own.last_heartbeats.get(node) == here:
                own.last_heartbeats[node] = told
        found = self._backend.set_state(_written(own), token)
        return found and (self._as_of_here(found[0]), *found[1:])

    def _as_of_here(self, written: bytes) -> bytes:
        state, seen, now = _read(written), {}, datetime.now(UTC)
        for node, told in state.last_heartbeats.items():
            last_told, here = self._seen.get(node, (None, now))
            seen[node] = (told, here if told == last_told else now)
            state.last_heartbeats[node] = seen[node][1]
        self._seen = seen
        return pickle.dumps(state)


def _written(state: _RendezvousState) -> bytes:
    beats = [[*astuple(node), time.isoformat()] for node, time in state.last_heartbeats.items()]
    told = {
        "round": state.round,
        "complete": state.complete,
        "deadline": state.deadline and state.deadline.isoformat(),
        "closed": state.closed,
        "participants": [[*astuple(node), rank] for node, rank in state.participants.items()],
        "wait_list": [astuple(node) for node in state.wait_list],
        "redundancy_list": [astuple(node) for node in state.redundancy_list],
        "last_heartbeats": beats,
    }
    return json.dumps(told).encode()


def _read(written: bytes) -> _RendezvousState:
    state = _RendezvousState()
    try:
        told = json.loads(written)
        state.round, deadline = int(told["round"]), told["deadline"]
        state.complete, state.closed = bool(told["complete"]), bool(told["closed"])
        state.deadline = None if deadline is None else _time(deadline)
        state.participants = {_node(*node): int(rank) for *node, rank in told["participants"]}
        state.wait_list = {_node(*node) for node in told["wait_list"]}
        state.redundancy_list = {_node(*node) for node in told["redundancy_list"]}
        state.last_heartbeats = {_node(*n): _time(time) for *n, time in told["last_heartbeats"]}
    except Exception as error:  # a stranger may have written anything
        raise RendezvousStateError(
            f"it must contain the hosts' own entries, but others have written there: {error!r}"
        ) from error
    return state


def _node(address: Any, pid: Any, number: Any) -> _NodeDesc:
    return _NodeDesc(str(address), int(pid), int(number))


def _time(told: str) -> datetime:
    return datetime.fromisoformat(told).astimezone(UTC)
