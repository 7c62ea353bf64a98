"""A worker of a job on several hosts, each with its own launcher that replaces lost workers.

Each launcher works as on a single host: it shares memory, starts a replacement, and lets it run the
program up to where the others are. Then all workers of all hosts restart together::

    host 0   worker 0  step 812 ─ misses worker 3 ──── waits ────┐
             worker 1  step 812 ─ misses worker 3 ──── waits ────┤ all reconnect and return to the
    host 1   worker 2  step 812 ─ misses worker 3 ──── waits ────┤ newest snapshot: step 809 ─►
             worker 3  step 8✕       replaced ─ the program ─────┘

They rendezvous in *rounds*, which the store counts. A loss during a round closes it: the count is
incremented, and all enter the next round. So workers may be lost at any time and any number of
times. Where they restart depends on what they do:

* in a loop: at the newest snapshot. Each host has every snapshot in its launcher's memory, so they
  only agree on a number: that of the newest snapshot that any worker knows to be complete.
* elsewhere, or before a loop's first snapshot: at the current replicated call. Workers that have
  finished the call store its outcome, which the others read.

While there are no connections, each worker listens at an address that it publishes in the store.
The others connect there and send nothing: the kernel answers even for a busy or stopped worker.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

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
from unisono.runtime.workers.meeting_point import COUNTER, Departure
from unisono.runtime.workers.membership import Membership
from unisono.runtime.workers.rendezvous import RankPlaces, Rendezvous, prefixed
from unisono.runtime.workers.supervisor import RECOVERS_VARIABLE, LauncherLink
from unisono.runtime.workers.team import StepBrokenError
from unisono.runtime.world import HOSTS_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


TOKEN_VARIABLE = "UNISONO_JOB"
_WHERE = "where all begin again, as a worker was lost"
_ROUND = "round"
_ENDS = {messages.ProgramDone: Departure.FINISHED, messages.ProgramFailed: Departure.FAILED}
_LOOK_EVERY_S = 0.1
_ATTEMPTS = 3


@final
class HostMember(LauncherLink):
    """The link of a worker whose launcher is one of several, one per host."""

    # The launcher knows only its own host.
    explains_waits = False

    def __init__(self) -> None:
        super().__init__()
        self.ranks_of_host = self._places.ranks_of_host
        self._neighbours = [self.control.lines[rank] for rank in self._places.local_ranks]
        self.address = address_here()
        self._store = self._store_of_hosts()
        self._heartbeats = Heartbeats(self._store, self.world.rank, self.address)
        self._index = self._snapshot = 0
        self._loop: Mapping[str, Any] | None = None
        self._is_member, self._waits = not self._is_replacement, False
        if self._is_replacement:
            self._heartbeats.show()

    @property
    def _is_replacement(self) -> bool:
        return self.can_replace and self.incarnation > 0

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
        """Connect to the workers of other hosts; a replacement does so later. Collective."""
        if not self._is_replacement:
            self._begin_again(0)

    def poll(self) -> None:
        """Receive from other hosts, which marks the workers lost there."""
        self._hosts_control.receive()

    def notify(self, message: messages.Notification) -> None:
        """Send a message to the launcher, and publish to other hosts what they may need."""
        if isinstance(message, messages.LoopBegan):
            self._loop = message.facts
            self._keep(f"loop {message.index}", json.dumps(dict(message.facts)).encode())
        elif isinstance(message, messages.ReplicatedResult):
            self._keep(f"outcome {message.index}", message.name.encode() + b"\n" + message.payload)
            self._index, self._loop, self._snapshot = message.index + 1, None, 0
        elif (how := _ENDS.get(type(message))) is not None:
            self.control.leave(self.world.rank, how)
        super().notify(message)

    def outcome(self, index: int, name: str) -> bytes | None:
        """Return the outcome of a replicated call that others have finished, or None."""
        if not self._is_over(index):
            return None
        said, _, payload = self._store.get(f"outcome {index}").partition(b"\n")
        if said.decode() != name:
            raise MismatchError(
                f"every worker must make the same calls in the same order, but rank "
                f"{self.world.rank} came to `{name}` where others came to `{said.decode()}`: call "
                f"it on every worker, not under `if rank == 0`."
            )
        return payload

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        """Wait until all workers of all hosts are back.

        Raises a StepBrokenError if others have finished the call that this worker is in.
        """
        if between_steps and self.control.head.end:
            return super().stopped(arrivals, between_steps=True)  # where this process is ended
        if not self.can_roll_back:
            how = {rank: self.control.departure(rank) for rank in range(self.world.world_size)}
            left = [rank for rank, one in how.items() if one != Departure.PRESENT]
            # Prefer the lost worker: the others have already stopped because of it.
            lost = min(left, key=lambda rank: how[rank] == Departure.STOPPED)
            why = (
                "what is called between two steps of a custom loop cannot begin again, except for "
                "`digest`: call it in a callback of `Trainer.fit`, or before or after the loop"
            )
            raise _ended(lost, why)
        with self._store_request():
            self._heartbeats.show()
            return self._begin_again(arrivals)

    def catch_up(self, index: int, name: str) -> messages.Passed | messages.Live:
        """Catch up through this host's launcher, then restart with all other workers."""
        self._index = index
        if not self._is_member:
            with self._waiting():
                answer = super().catch_up(index, name)
            if isinstance(answer, messages.Passed):
                return answer
            self._is_member, self._loop, self._snapshot = True, answer.loop, answer.snapshot
        try:
            with self._store_request():
                membership = self._begin_again(self.control.lines[self.world.rank].arrivals)
        except StepBrokenError:
            payload, key = self.outcome(index, name) or b"", f"loop {index}"
            facts = json.loads(self._store.get(key)) if self._store.check([key]) else None
            self.notify(messages.ReplicatedResult(index, name, payload))
            return messages.Passed(payload, facts)
        return messages.Live(membership, self.agreed_loop, is_alone=True)

    def _begin_again(self, arrivals: int) -> Membership:
        """Wait for all workers of all hosts, and reconnect to them. Collective."""
        failures = 0
        while not self._is_over(self._index):
            # Workers that have not noticed the loss may still wait for this one.
            self.control.leave(self.world.rank, Departure.STOPPED)
            while any(line.departure == Departure.LOST for line in self._neighbours):
                with self._waiting():
                    super().stopped(arrivals, between_steps=True)
            try:
                return self._meet_in_round(arrivals)
            except _RoundClosedError:
                continue
            except RendezvousError as error:
                # A worker that was lost a moment ago cannot be reached.
                failures += 1
                if failures == _ATTEMPTS or isinstance(error.__cause__, TimeoutError):
                    raise
        raise StepBrokenError

    @contextmanager
    def _store_request(self) -> Iterator[None]:
        """Raise an error that names rank 0 if the host with the store is lost."""
        try:
            yield
        except RuntimeError as error:
            why = f"the store on its host does not answer ({error})"
            raise _ended(0, why) from error

    def _meet_in_round(self, arrivals: int) -> Membership:
        number = self._enter_round()
        try:
            rendezvous = self._rendezvous(number)
            newest = self.newest_snapshot() if self._loop and self.newest_snapshot else 0
            mine = [self._index, arrivals, max(newest, self._snapshot), self._loop]
            heard = rendezvous.gathering(_WHERE, MEETING.in_s()).gather("workers", mine)
            indices, counts, snapshots, loops = zip(*heard, strict=True)
            if len(set(indices)) > 1:  # those behind read the outcome first
                raise _RoundClosedError
            links = connect_hosts(rendezvous, self.address)
            self._hosts_control.connect(links, (max(counts) + 2) % COUNTER)
            rendezvous.gather("workers that have connected anew", None)
        except (_RoundClosedError, RendezvousError):
            self._close_round(number)
            raise
        self._heartbeats.hide()
        self.agreed_snapshot = max(snapshots)
        self.agreed_loop = next(filter(None, loops), None)
        return Membership(tuple(range(self.world.world_size)), 0, number)

    def _enter_round(self) -> int:
        """Return the number of the current round; each rank enters a round at most once.

        Replacements count as the rank that they replace.
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

    def _rendezvous(self, number: int) -> Rendezvous:
        processes = self._processes

        def watch(waited_s: float) -> None:
            if self._processes != processes or self._is_over(self._index):
                raise _RoundClosedError
            if int(self._store.get(_ROUND)) != number:
                raise _RoundClosedError
            self._poll_hosts()

        store = prefixed(f"{_ROUND} {number}", self._store)
        return Rendezvous(
            store,
            self._places,
            lambda rank: not self.control.departure(rank).may_be_back,
            watch=watch,
        )

    def _await_answer(self) -> None:
        while self._waits and not select.select([self._channel], [], [], _LOOK_EVERY_S)[0]:
            self._poll_hosts()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Keep checking the other hosts while waiting for this host's launcher."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _poll_hosts(self) -> None:
        self.poll()
        for rank in range(self.world.world_size):
            how = self.control.departure(rank)
            if not how.may_be_back:
                if how != Departure.FINISHED or not self._is_over(self._index):
                    raise _ended(rank, "nobody takes its place")
                continue
            is_missed = how == Departure.LOST and self._hosts_control.is_far(rank)
            if is_missed and self._heartbeats.silent_s(rank) > LOST_AFTER_S:
                raise _ended(rank, f"nobody took its place within {LOST_AFTER_S:.0f} s")

    @property
    def _processes(self) -> list[tuple[int, int] | None]:
        return [None if line.has_died else line.process for line in self._neighbours]

    def _is_over(self, index: int) -> bool:
        return bool(self._store.check([f"outcome {index}"]))

    def _keep(self, key: str, value: bytes) -> None:
        """Store a value unless it is there; ignore a store that has ended with the program."""
        try:
            if self.can_replace and not self._store.check([key]):
                self._store.set(key, value)  # type: ignore[arg-type]  # accepts bytes
        except RuntimeError:
            return

    def _store_of_hosts(self) -> Store:
        from torch._C._distributed_c10d import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=RENDEZVOUS.in_s())
        store = TCPStore(address, port, None, False, limit, wait_for_workers=False)
        notice_lost_store(port)
        return prefixed(f"unisono/{os.environ[TOKEN_VARIABLE]}", store)


class _RoundClosedError(BaseException):
    """A worker was lost during a round: all enter the next one."""


def _ended(rank: int, why: str) -> UnisonoError:
    return PeerLostError(
        f"every worker must stay until the end of the run, but rank {rank} was lost, and {why}: "
        f"find out what ended it, or its host; with a `directory` the next start continues from "
        f"the newest checkpoint.",
        rank=rank,
    )


_BACKLOG = 4096


@final
class Heartbeats:
    """Listen for the other workers' checks, and check whether they are alive."""

    def __init__(self, store: Store, rank: int, address: str) -> None:
        self._store, self._rank, self._address = store, rank, address
        self._listening: socket.socket | None = None
        self._links: dict[int, socket.socket] = {}
        self._places: dict[int, str] = {}
        self._silent_since_s: dict[int, float] = {}

    def show(self) -> None:
        """Start listening, and publish the address."""
        if self._listening is None:
            self._listening = socket.create_server((self._address, 0), backlog=_BACKLOG)
            place = json.dumps(self._listening.getsockname()[:2])
            self._store.set(_key(self._rank), place)

    def hide(self) -> None:
        """Stop listening and close all heartbeat connections."""
        for link in self._links.values():
            link.close()
        if self._listening is not None:
            self._listening.close()
        self._listening = None
        self._links.clear()
        self._silent_since_s.clear()

    def silent_s(self, rank: int) -> float:
        """Return how long the current worker of `rank` has not answered; 0.0 if it answers."""
        place = self._store.get(_key(rank)).decode() if self._store.check([_key(rank)]) else ""
        if place != self._places.get(rank, ""):
            self._places[rank] = place
            self._call(rank, *json.loads(place))
        try:
            if rank in self._links:
                self._links[rank].recv(1)  # the others never send anything
        except BlockingIOError:
            self._silent_since_s.pop(rank, None)
            return 0.0
        except ConnectionResetError:
            pass
        except OSError:
            return math.inf  # the kernel of its host has not answered for long
        now_s = time.monotonic()
        return now_s - self._silent_since_s.setdefault(rank, now_s)

    def _call(self, rank: int, address: str, port: int) -> None:
        if (before := self._links.pop(rank, None)) is not None:
            before.close()
        with contextlib.suppress(OSError):
            self._links[rank] = socket.create_connection((address, port), LOST_AFTER_S / 2)
            watch_link(self._links[rank])


def _key(rank: int) -> str:
    return f"sign of {rank}"
