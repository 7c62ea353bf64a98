"""Who lets the ranks of a process group find each other? The launcher: here they wait.

    a GroupRequest ──► gathering ──► the store is started, once; answers; words for the user

It decides nothing: who goes on is said by ``gathering``, and this does it.

Invariant: nothing listens before all ranks of a first group have come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol

from unisono.launch import gathering
from unisono.launch.gathering import Arrival, GoOn, Refuse, Tell
from unisono.launch.loopback import LoopbackPort
from unisono.workers.launcher_messages import Gathered, GroupRequest, Refused, ToWorker, Why

_TOKEN_BYTES = 8


class StoreStarter(Protocol):
    """Who starts the store: the fork server."""

    def start_store(self, fd: int, port: int) -> None:
        """Start it at a socket that listens."""

    def end_store(self) -> None:
        """End it."""


class Groups:
    """The waiting ranks of one job, and its store. Final.

    Args:
        num_workers: how many workers there are.
        host: starts the store.
        send: sends a worker an answer.
        say: where words for the user go.

    Attributes:
        port: the job's port, at which ranks meet if the program names no other.
        store_port: where the store listens; None as long as nobody has needed it.
    """

    def __init__(
        self,
        num_workers: int,
        host: StoreStarter,
        send: Callable[[int, ToWorker], None],
        say: Callable[[str], None],
    ) -> None:
        self.port = LoopbackPort()
        self._host = host
        self._send = send
        self._say = say
        self._state = gathering.GatheringState(frozenset(range(num_workers)))
        self.store_port: int | None = None
        # A file that outlived another job holds that one's keys, so the job has a name too.
        self._token = os.urandom(_TOKEN_BYTES).hex()
        self._num_gathered = 0

    @property
    def waiting(self) -> frozenset[int]:
        """The workers that stand still because somebody has not come."""
        return self._state.waiting

    def hear(self, worker: int, request: GroupRequest) -> None:
        """Take a worker that has come to make a group."""
        arrival = Arrival(
            worker,
            request.place,
            request.rank,
            request.world_size,
            time.monotonic(),
            request.timeout_s,
            request.needs_store,
        )
        self._take(*gathering.come(self._state, arrival))

    def gone(self, worker: int) -> None:
        """Note that a worker will make no group any more."""
        self._take(*gathering.leave(self._state, worker))

    def look(self) -> None:
        """See whether somebody has waited for long."""
        self._take(*gathering.look(self._state, time.monotonic()))

    def at_most(self, timeout_s: float | None) -> float | None:
        """Say how long a wait may last that should not miss the next look."""
        due_s = gathering.due_s(self._state)
        if due_s is None:
            return timeout_s
        left_s = max(0.0, due_s - time.monotonic())
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def close(self) -> None:
        """End the store and give the port back."""
        self.port.close()
        if self.store_port is not None:
            self._host.end_store()

    def _take(
        self, state: gathering.GatheringState, outcomes: tuple[gathering.Outcome, ...]
    ) -> None:
        self._state = state
        for outcome in outcomes:
            match outcome:
                case GoOn(complete):
                    self._let_go_on(complete)
                case Refuse():
                    self._refuse(outcome)
                case Tell(message):
                    self._say(message)

    def _let_go_on(self, complete: gathering.Gathering) -> None:
        self._num_gathered += 1
        answer: Gathered | Refused
        try:
            port = self._store() if any(one.needs_store for one in complete.came) else 0
            answer = Gathered(f"unisono/{self._token}/{self._num_gathered}", port)
        except OSError as error:
            answer = Refused(str(error), Why.STORE)
        for worker in sorted(complete.workers):
            self._send(worker, answer)

    def _store(self) -> int:
        """Say at which port the store is, and start it when it is needed for the first time."""
        if self.port.trouble:
            raise OSError(
                f"the launcher must hold a store on loopback for `init_process_group`, but "
                f'{self.port.trouble}: allow it, or use `init_method="file:///a/new/file"`, which '
                "needs no port."
            )
        if self.store_port is None:
            with self.port.listen() as listening:
                port = int(listening.getsockname()[1])
                # Whoever comes before the store has begun waits in the queue of the socket.
                self._host.start_store(listening.fileno(), port)
            self.store_port = port
        return self.store_port

    def _refuse(self, refusal: Refuse) -> None:
        answer = Refused(
            refusal.reason, refusal.why, refusal.lost, refusal.missing, refusal.waited_s
        )
        for worker in sorted(refusal.workers):
            self._send(worker, answer)
