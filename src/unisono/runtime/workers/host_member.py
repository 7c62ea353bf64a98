"""A worker of a job on several hosts, each with its own launcher that outlives its workers.

When a worker is lost, every launcher kills all of its workers and starts them again. They run the
program as a replacement does on one host: they take the outcomes of completed calls from their
launcher, until they reach the call that the workers were in. There all of them meet::

    host 0   launcher ─ keeps snapshot 9 ──────────────────────────────────────────────
             workers    step 812 ─ miss worker 3 ✕   again ─ the program ─┐
    host 1   launcher ─ keeps snapshot 9 ──────────────────────────────────────────────
             workers    step 8✕ (worker 3) ─────✕    again ─ the program ─┴─ step 809 ─►

They meet in *rounds*, which the store counts. A loss during a round closes it: the count is
incremented, and all enter the next round. Where they continue depends on what they did:

* in a loop: at the newest snapshot. Every launcher has the memory of it, so they only agree on a
  number: that of the newest snapshot that any host knows to be complete.
* elsewhere, or before a loop's first snapshot: at the current replicated call. Workers that have
  finished the call store its outcome, which the others read.

Once a launcher has started its workers again, it listens at an address that they have published in
the store. Others connect there and send nothing: the connection lives as long as the launcher.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, final

from unisono.errors import MismatchError, PeerLostError, RendezvousError, UnisonoError
from unisono.runtime.timeouts import MEETING, RENDEZVOUS
from unisono.runtime.workers import launcher_messages as messages
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.host_links import (
    LOST_AFTER_S,
    connect_hosts,
    notice_lost_store,
    watch_link,
)
from unisono.runtime.workers.hosts_control_block import HostsControlBlock
from unisono.runtime.workers.interfaces import address_here
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.membership import Membership
from unisono.runtime.workers.rendezvous import RankPlaces, Rendezvous, prefixed
from unisono.runtime.workers.supervisor import (
    LAUNCHER_PORT_VARIABLE,
    RECOVERS_VARIABLE,
    LauncherLink,
)
from unisono.runtime.world import HOSTS_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


TOKEN_VARIABLE = "UNISONO_JOB"
CONNECTED = "connected"
"""In the store's part of a start: workers notice by themselves that a host is lost."""
_WHERE = "the meeting of all hosts after the loss of a worker"
_WHERE_AT_FIRST = "the first meeting of all hosts"
_ROUND = "round"
_ENDS = {messages.ProgramDone: Departure.FINISHED, messages.ProgramFailed: Departure.FAILED}
_LOOK_EVERY_S = 0.05
_ATTEMPTS = 3


@final
class HostMember(LauncherLink):
    """The link of a worker whose launcher is one of several, one per host."""

    # The launcher knows only its own host.
    explains_waits = False

    def __init__(self) -> None:
        super().__init__()
        self.ranks_of_host = self._places.ranks_of_host
        self.address = address_here()
        self._store = self._store_of_hosts()
        self._launchers = Launchers(self._store, self._places)
        # Also where another worker was lost.
        self.is_replacement = self.can_replace and self.control.head.starts_again > 0
        if self.is_replacement:
            self._store.delete_key(CONNECTED)
        self._live: messages.Live | None = None  # once this worker has caught up on its host
        self._launchers.publish(self.address, int(os.environ[LAUNCHER_PORT_VARIABLE]))

    def _map(self, fd: int) -> ControlBlock:
        sizes = map(int, os.environ[HOSTS_VARIABLE].split(","))
        hosts = [str(host) for host, size in enumerate(sizes) for _ in range(size)]
        self._places = RankPlaces.of(self.world.rank, hosts)
        are_replaced = os.environ.get(RECOVERS_VARIABLE) == "1"
        self._hosts_control = HostsControlBlock(fd, self._places, are_replaced=are_replaced)
        return self._hosts_control

    def open_store(self) -> Store:
        """Open a part of the store at MASTER_ADDR."""
        return prefixed("program", self._store)

    def connect(self) -> None:
        """Connect to the workers of other hosts; after a restart that is later. Collective."""
        if not self.is_replacement:
            self._meet(0, 0)

    def poll(self) -> None:
        """Receive from other hosts, which marks the workers lost there."""
        self._hosts_control.receive()

    def notify(self, message: messages.Notification) -> None:
        """Send a message to the launcher, and publish to other hosts what they may need."""
        if self.control.has_lost and _is_of_loops_end(message):
            return  # the loop has not ended, and others may start again before this process ends
        if isinstance(message, messages.ReplicatedResult):
            self._publish_outcome(message)
        elif (how := _ENDS.get(type(message))) is not None:
            self.control.leave(self.world.rank, how)
        super().notify(message)

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """Stop until this host's launcher kills this process, to end the job or start it again.

        Raises PeerLostError if the launcher of a lost worker is gone too.
        """
        if not between_steps:
            try:
                with self._store_request():
                    self._await_launchers()
            except PeerLostError:
                self.control.has_lost = True
                raise
        return super().stopped(arrivals, between_steps=between_steps)

    def catch_up(self, index: int, name: str) -> messages.Passed | messages.Live:
        """Catch up through this host's launcher, then meet all other workers."""
        if self._live is None:
            answer = super().catch_up(index, name)
            if isinstance(answer, messages.Passed):
                return answer
            self._live = answer
        snapshot = self._live.snapshot if self._live.loop is not None else 0
        met = self._meet(index, snapshot)
        if met is None:
            loop = self._live.loop
            self._live = messages.Live(self._live.membership, None, is_alone=True)
            with self._store_request():
                payload = self._outcome(index, name)
            self.notify(messages.ReplicatedResult(index, name, payload))
            return messages.Passed(payload, loop)
        membership, newest = met
        loop = self._live.loop if newest else None
        assert not newest or loop is not None, "every host knows a loop that has a snapshot"
        return messages.Live(membership, loop, is_alone=True, snapshot=newest)

    def _meet(self, index: int, snapshot: int) -> tuple[Membership, int] | None:
        """Connect to all workers of all hosts, which are at the same replicated call. Collective.

        Return the number of the newest snapshot too; or None if others have finished the call.
        """
        failures = 0
        with self._store_request():
            while not self._is_over(index):
                try:
                    return self._meet_in_round(index, snapshot)
                except _RoundClosedError:
                    continue
                except RendezvousError as error:
                    # A worker that was lost a moment ago cannot be reached; after a restart, all
                    # have reached each other before.
                    failures += 1
                    is_late = isinstance(error.__cause__, TimeoutError)
                    if not self.is_replacement and (is_late or failures == _ATTEMPTS):
                        raise
        return None

    def _meet_in_round(self, index: int, snapshot: int) -> tuple[Membership, int]:
        number = self._enter_round()
        try:
            rendezvous = self._rendezvous(number, index)
            mine = [index, snapshot]
            where = _WHERE if number else _WHERE_AT_FIRST
            heard = rendezvous.gathering(where, MEETING.in_s()).gather("workers", mine)
            indices, snapshots = zip(*heard, strict=True)
            if len(set(indices)) > 1:  # those behind read the outcome first
                raise _RoundClosedError
            self._hosts_control.connect(connect_hosts(rendezvous, self.address))
            rendezvous.gather("workers that have connected anew", None)
            self._store.set(CONNECTED, "")
        except (_RoundClosedError, RendezvousError):
            self._close_round(number)
            raise
        self._launchers.leave()
        return Membership(tuple(range(self.world.world_size)), 0, number), max(snapshots)

    def _enter_round(self) -> int:
        """Return the number of the current round; each rank enters a round at most once.

        A process that was started again counts as the rank that it replaces.
        """
        self._store.compare_set(_ROUND, "", "0")
        while True:
            number = int(self._store.get(_ROUND))
            entered = f"{number} with {self.world.rank}"
            if not self._store.check([entered]):
                self._store.set(entered, "")
                return number
            self._close_round(number)

    def _close_round(self, number: int) -> None:
        self._store.compare_set(_ROUND, str(number), str(number + 1))

    def _rendezvous(self, number: int, index: int) -> Rendezvous:
        def watch(waited_s: float) -> None:
            if int(self._store.get(_ROUND)) != number or self._is_over(index):
                raise _RoundClosedError
            is_watching = number > 0 and self.world.rank == self._places.local_ranks[0]
            for host, ranks in self._others if is_watching else ():
                if self._launchers.is_gone(host):
                    raise _ended(ranks[0], "so was its launcher")

        store = prefixed(f"{_ROUND} {number}", self._store)
        # This host's launcher starts all of its workers again if one of them is lost.
        return Rendezvous(store, self._places, lambda rank: False, watch=watch)

    def _await_launchers(self) -> None:
        """Wait until every launcher that has lost a worker starts its workers again."""
        until_s = time.monotonic() + LOST_AFTER_S
        missed = self._missed()
        while missed:
            if time.monotonic() >= until_s:
                raise _ended(missed[0], f"nobody took its place within {LOST_AFTER_S:.0f} s")
            time.sleep(_LOOK_EVERY_S)
            missed = self._missed()
        self._launchers.leave()

    def _missed(self) -> list[int]:
        """Return the lost rank of each other host whose launcher does not start it again."""
        self.poll()
        how = {rank: self.control.departure(rank) for rank in range(self.world.world_size)}
        for rank, one in how.items():
            if not one.may_be_back and one != Departure.FINISHED:
                raise _ended(rank, "nobody takes its place")
        lost = {
            host: next((rank for rank in ranks if how[rank] == Departure.LOST), None)
            for host, ranks in self._others
        }
        return [
            rank
            for host, rank in lost.items()
            if rank is not None and not self._launchers.answers(host)
        ]

    @property
    def _others(self) -> list[tuple[int, tuple[int, ...]]]:
        """The other hosts, each with its ranks."""
        return [
            (host, ranks)
            for host, ranks in enumerate(self.ranks_of_host)
            if self.world.rank not in ranks
        ]

    def _is_over(self, index: int) -> bool:
        return bool(self._store.check([_key_of(index)]))

    def _outcome(self, index: int, name: str) -> bytes:
        """Return the outcome of a replicated call that others have finished."""
        said, _, payload = self._store.get(_key_of(index)).partition(b"\n")
        if said.decode() != name:
            raise MismatchError(
                f"every worker must make the same calls in the same order, but rank "
                f"{self.world.rank} came to `{name}` where others came to `{said.decode()}`: call "
                f"it on every worker, not under `if rank == 0`."
            )
        if name == messages.LOOP and not payload:
            raise _ended(self._others[0][1][0], "a worker has left this loop within a step")
        return payload

    def _publish_outcome(self, result: messages.ReplicatedResult) -> None:
        """Store an outcome unless it is there; ignore a store that has ended with the program."""
        key, value = _key_of(result.index), result.name.encode() + b"\n" + result.payload
        with suppress(RuntimeError):
            if self.can_replace and not self._store.check([key]):
                self._store.set(key, value)  # type: ignore[arg-type]  # accepts bytes

    @contextmanager
    def _store_request(self) -> Iterator[None]:
        """Raise an error that names rank 0 if the host with the store is lost."""
        try:
            yield
        except RuntimeError as error:
            why = f"the store on its host does not answer ({error})"
            raise _ended(0, why) from error

    def _store_of_hosts(self) -> Store:
        from torch._C._distributed_c10d import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=RENDEZVOUS.in_s())
        store = TCPStore(address, port, None, False, limit, wait_for_workers=False)
        notice_lost_store(port)
        return prefixed(part_of_start(os.environ[TOKEN_VARIABLE]), store)


def _is_of_loops_end(message: messages.Notification) -> bool:
    if isinstance(message, messages.ReplicatedResult):
        return message.name == messages.LOOP
    return isinstance(message, messages.NoRecovery)


def part_of_start(token: str) -> str:
    """Return the prefix of what the workers of one start write to the store."""
    return f"unisono/{token}"


class _RoundClosedError(BaseException):
    """A worker was lost during a round: all enter the next one."""


def _key_of(index: int) -> str:
    return f"outcome {index}"


def _ended(rank: int, why: str) -> UnisonoError:
    return PeerLostError(
        f"every worker must stay until the end of the run, but rank {rank} was lost, and {why}: "
        f"find out what ended it, or its host; with a `directory` the next start continues from "
        f"the newest checkpoint.",
        rank=rank,
    )


@final
class Launchers:
    """The launchers of other hosts, as far as one can tell whether they are alive.

    A launcher listens from the time it first starts its workers again.
    """

    def __init__(self, store: Store, places: RankPlaces) -> None:
        self._store, self._places = store, places
        self._links: dict[int, socket.socket] = {}
        self._unreached_since_s: dict[int, float] = {}

    def publish(self, address: str, port: int) -> None:
        """Publish where the launcher of this host will listen."""
        host = self._places.ranks_of_host.index(self._places.local_ranks)
        self._store.set(_key_of_launcher(host), json.dumps([address, port]))

    def leave(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._unreached_since_s.clear()

    def answers(self, host: int) -> bool:
        """Return whether the launcher of a host has started its workers again, and is alive."""
        if host not in self._links:
            self._call(host)
        return host in self._links and not self._has_ended(host)

    def is_gone(self, host: int) -> bool:
        """Return whether a launcher that had answered has ended, or its host is unreachable."""
        if host not in self._links:
            self._call(host)
        since_s = self._unreached_since_s.get(host, math.inf)
        is_unreachable = time.monotonic() - since_s > LOST_AFTER_S
        return is_unreachable or (host in self._links and self._has_ended(host))

    def _has_ended(self, host: int) -> bool:
        try:
            self._links[host].recv(1)  # it never sends anything
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _call(self, host: int) -> None:
        started_s, key = time.monotonic(), _key_of_launcher(host)
        if not self._store.check([key]):
            return
        address, port = json.loads(self._store.get(key))
        try:
            self._links[host] = socket.create_connection((address, port), LOST_AFTER_S / 2)
            watch_link(self._links[host])
        except ConnectionRefusedError:
            pass  # its host is there, and it has not started its workers again
        except OSError:
            self._unreached_since_s.setdefault(host, started_s)
            return
        self._unreached_since_s.pop(host, None)


def _key_of_launcher(host: int) -> str:
    return f"launcher of host {host}"
