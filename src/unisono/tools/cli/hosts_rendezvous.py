"""Which hosts compute together, and from when on? Their agents agree on it in a store.

Hosts enter *rounds*, which the store counts. A round is closed once: when every host has entered
it, or some time after enough have. The hosts in it then start together. A host that must begin
again, or that joins later, opens the next round, and the others follow::

    host 0   enters 0 ─┐ closed ─ runs ─ misses host 1 ─ enters 1 ─ closed ─ runs ─ enters 2 ─┐
    host 1   enters 0 ─┘ closed ─ runs ✕                     comes back, opens and enters 2 ──┘

Each agent counts up a *beat* in the store. Clocks of hosts may differ, and a store may be stopped,
so an agent does not measure time: a host is lost if its beat was the same in many looks.

Everything in the store is JSON: a stranger who writes there can disturb the run, but executes
nothing.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar, final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from unisono.errors import RendezvousError
from unisono.runtime.workers.host_member import CONNECTED, part_of_start
from unisono.tools.cli.endings import SeveralHosts

LOOK_EVERY_S = 0.25
# For so many looks more hosts may come, and a host need not beat: 10 s.
OTHERS_MAY_COME = LOST_AFTER = 40
_ANSWERS_WITHIN = timedelta(seconds=60)

T = TypeVar("T")


def serve(listening: socket.socket) -> TCPStore:
    """Return a store that listens there alone; torch would listen at all addresses."""
    with closing(listening):
        address, port = listening.getsockname()[:2]
        fd = listening.detach()
        return TCPStore(address, port, None, True, _ANSWERS_WITHIN, master_listen_fd=fd)


def reach(address: str, port: int) -> TCPStore:
    """Connect to a store."""
    return TCPStore(address, port, None, False, _ANSWERS_WITHIN)


@dataclass(frozen=True, slots=True)
class Entry:
    """A host in a round."""

    number: int  # as `--node-rank` says
    process: str  # the agent's unique name: process IDs repeat in containers
    workers: int  # how many it starts


@dataclass(frozen=True, slots=True)
class HostsStart:
    """What the hosts of a closed round start with."""

    round: int
    index: int  # of this host among `entries`
    entries: Sequence[Entry]  # in the order of their numbers; some hosts may be missing
    token: str  # a secret of this start


@final
class HostsRendezvous:
    """One host's part in the rendezvous of all. No method waits for another host."""

    def __init__(self, store: Store, hosts: SeveralHosts, me: Entry) -> None:
        self._store, self._nnodes = PrefixStore(f"hosts of {hosts.run}", store), hosts.nnodes
        self._workers_store = store
        self._me = me
        self._entered, self._num_enough, self._beat = -1, 0, 0
        self._others: Sequence[Entry] = ()
        # Of each process the first beat that was seen, the last one, and in how many looks.
        self._seen: dict[str, tuple[bytes, bytes, int]] = {}
        told = self._agreed("number of hosts", str(hosts.nnodes))
        if told != str(hosts.nnodes):
            raise RendezvousError(
                f"`--nnodes` must be the same on every host, but is {hosts.nnodes} here and "
                f"{told!r} on one that arrived earlier: start this one again with that, or all "
                f"others."
            )
        self._agreed("round", "0")

    def look(self) -> HostsStart | None:
        """Take part in the current round; return how to start once it is closed."""
        number = self._current()
        closed = self._read(f"closed {number}", _closed)
        if closed is None:
            self._enter(number)
            return None
        token, entries = closed
        if number == self._entered and self._me in entries:
            self._others = [one for one in entries if one != self._me]
            return HostsStart(number, entries.index(self._me), entries, token)
        earlier = [one for one in entries if one.number == self._me.number]
        if all(one == self._me or self._is_replaceable(one) for one in earlier):
            self.begin_again(number)
        return None

    def begin_again(self, after: int) -> None:
        """Open the round after this one, unless another host has."""
        self._store.compare_set("round", str(after), str(after + 1))

    def is_over(self, start: HostsStart) -> bool:
        """Return whether another host begins again or has joined."""
        return self._current() != start.round

    def has_newcomer(self, start: HostsStart) -> bool:
        """Return whether a host waits that was not there at the start."""
        return any(one not in start.entries for one in self._entries_of(self._current()))

    def lacks_one(self) -> bool:
        """Return whether a host of this start is lost."""
        return any(map(self._is_lost, self._others))

    def are_connected(self, start: HostsStart) -> bool:
        """Return whether workers are connected, and notice by themselves that a host is lost."""
        return self._workers_store.check([f"{part_of_start(start.token)}/{CONNECTED}"])

    def is_needed(self) -> bool:
        """Return whether another host of this start still needs the store."""
        return not all(map(self._is_lost, self._others))

    def beat(self) -> None:
        """Report that this host is there."""
        self._beat += 1
        self._store.set(f"beat of {self._me.process}", str(self._beat))

    def end(self, status: int) -> None:
        """End the run of all hosts with an exit status, unless another host has ended it."""
        self._agreed("ended", str(status))

    def ended(self) -> int | None:
        """Return the exit status with which a host has ended the run, or None."""
        return self._read("ended", lambda status: min(max(int(status), 0), 255))

    def leave(self) -> None:
        """Report that this host no longer needs the store."""
        self._store.set(f"beat of {self._me.process}", "")

    def _current(self) -> int:
        self.beat()
        return self._read("round", int) or 0

    def _enter(self, number: int) -> None:
        """Enter a round, unless an earlier process of this host may be there; close it if due."""
        key, mine = f"{number} with {self._me.number}", json.dumps(asdict(self._me))
        if (holder := _parsed(self._agreed(key, mine), _entry)) != self._me:
            if self._is_replaceable(holder):
                self._store.set(key, mine)
            return
        if number != self._entered:
            self._entered, self._num_enough = number, 0
        entered = self._entries_of(number)
        there = [one for one in entered if one == self._me or self._is_there(one)]
        self._others = [one for one in there if one != self._me]
        self._num_enough = self._num_enough + 1 if len(there) >= self._nnodes.least else 0
        is_due = self._num_enough > OTHERS_MAY_COME and not self._is_one_to_come(number, entered)
        if len(there) == self._nnodes.most or is_due:
            closed = {"token": secrets.token_hex(16), "entries": [asdict(one) for one in there]}
            self._agreed(f"closed {number}", json.dumps(closed))

    def _is_one_to_come(self, number: int, entered: Sequence[Entry]) -> bool:
        """Return whether a host of the round before has yet to end its launcher."""
        _, before = self._read(f"closed {number - 1}", _closed) or ("", ())
        numbers = [one.number for one in entered]
        return any(not self._is_lost(one) for one in before if one.number not in numbers)

    def _entries_of(self, number: int) -> list[Entry]:
        """Return the hosts in a round, in the order of their numbers."""
        hosts = range(self._nnodes.most)
        told = [self._read(f"{number} with {host}", _entry) for host in hosts]
        return [one for one in told if one is not None]

    def _is_replaceable(self, other: Entry) -> bool:
        """Return whether a host with this one's number is lost; raise if it is there."""
        if is_there := self._is_there(other):
            raise RendezvousError(
                f"`--node-rank` must differ on each host, but another one that is there has "
                f"{self._me.number}, too: number them from 0, and give each run a `--rendezvous` "
                f"of its own."
            )
        return is_there is False

    def _is_there(self, other: Entry) -> bool | None:
        """Return whether a host beats; None where this is not known yet. Counts this look."""
        key = f"beat of {other.process}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        first, last, num_looks = self._seen.get(other.process, (beat, beat, 0))
        num_looks = num_looks + 1 if beat == last else 0
        self._seen[other.process] = first, beat, num_looks
        if not beat or num_looks >= LOST_AFTER:
            return False
        return True if beat != first else None

    def _is_lost(self, other: Entry) -> bool:
        return self._is_there(other) is False

    def _agreed(self, key: str, value: str) -> str:
        """Return the first value that a host has stored, which may be this one."""
        return self._store.compare_set(key, "", value).decode(errors="replace")

    def _read(self, key: str, parse: Callable[[Any], T]) -> T | None:
        """Return what a host has stored, or None."""
        return _parsed(self._store.get(key), parse) if self._store.check([key]) else None


def _parsed(told: str | bytes, parse: Callable[[Any], T]) -> T:
    try:
        return parse(json.loads(told))
    except Exception as error:  # anyone who reaches the store may have written anything
        raise RendezvousError(
            f"the store at `--rendezvous` must contain the hosts' own entries, but others have "
            f"written there ({error!r}): start all hosts again at another port."
        ) from error


def _entry(told: Any) -> Entry:
    return Entry(int(told["number"]), str(told["process"]), int(told["workers"]))


def _closed(told: Any) -> tuple[str, Sequence[Entry]]:
    return str(told["token"]), [_entry(one) for one in told["entries"]]
