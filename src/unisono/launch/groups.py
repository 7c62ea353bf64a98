"""How do the ranks of a process group find each other? They wait for each other in the launcher.

    a GroupRequest ──► gathering ──► the store is started, once; answers

``gathering`` decides who continues; this does it.

Invariant: nothing listens before all ranks of a first group have come.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable

from unisono.launch import gathering
from unisono.launch.environment import ADDRESS
from unisono.launch.forkserver import ForkServer
from unisono.launch.gathering import Arrival, Complete, Gathering, GatheringState, Refuse
from unisono.workers.launcher_messages import Gathered, GroupRequest, Refused, ToWorker, Why

_TOKEN_BYTES = 8
_BACKLOG = 1024


class Groups:
    """The waiting ranks of one job, and its store. Final.

    Args:
        num_workers: how many workers there are.
        server: starts the store.
        send: sends a worker an answer.

    Attributes:
        port: the job's port, at which ranks meet if the program names no other.
        store_port: where the store listens; None before it is needed.
    """

    def __init__(
        self, num_workers: int, server: ForkServer, send: Callable[[int, ToWorker], None]
    ) -> None:
        self.port = LoopbackPort()
        self.store_port: int | None = None
        self._server = server
        self._send = send
        self._state = GatheringState(frozenset(range(num_workers)))
        # A file that outlived another job holds that one's keys, so the job has a name too.
        self._token = os.urandom(_TOKEN_BYTES).hex()
        self._num_gathered = 0

    @property
    def waiting(self) -> frozenset[int]:
        """The workers that wait for one that has not come."""
        return self._state.waiting

    @property
    def places(self) -> dict[int, str]:
        """Where each of those waits, in words."""
        return self._state.places

    def hear(self, worker: int, request: GroupRequest) -> None:
        """Have a worker that wants to make a group wait for the others."""
        arrival = Arrival(worker, request, time.monotonic())
        self._take(*gathering.come(self._state, arrival))

    def gone(self, worker: int) -> None:
        """Note that a worker will not make a group again."""
        self._take(*gathering.leave(self._state, worker))

    def look(self) -> None:
        """Give up on ranks that others have waited for long enough."""
        self._take(*gathering.look(self._state, time.monotonic()))

    @property
    def due_s(self) -> float:
        """When to :meth:`look` next, in the time of ``time.monotonic``."""
        return self._state.due_s

    def close(self) -> None:
        """End the store and give the port back."""
        self.port.close()
        if self.store_port is not None:
            self._server.end_store()

    def _take(self, state: GatheringState, outcomes: gathering.Outcomes) -> None:
        self._state = state
        for outcome in outcomes:
            match outcome:
                case Complete(complete):
                    self._complete(complete)
                case Refuse(workers, answer):
                    self._answer(workers, answer)

    def _complete(self, complete: Gathering) -> None:
        self._num_gathered += 1
        answer: Gathered | Refused
        try:
            port = self._store() if any(one.request.needs_store for one in complete.came) else 0
            answer = Gathered(f"unisono/{self._token}/{self._num_gathered}", port)
        except OSError as error:
            answer = Refused(str(error), Why.STORE)
        self._answer(complete.workers, answer)

    def _store(self) -> int:
        """Return the port of the store, which the first call starts."""
        if self.port.trouble:
            raise OSError(
                f"the launcher must hold a store on loopback for `init_process_group`, but "
                f'{self.port.trouble}: allow it, or use `init_method="file:///a/new/file"`, which '
                "needs no port."
            )
        if self.store_port is None:
            with self.port.listen() as listening:
                port = int(listening.getsockname()[1])
                # A rank that connects before the store has started waits in the socket's queue.
                self._server.start_store(listening.fileno(), port)
            self.store_port = port
        return self.store_port

    def _answer(self, workers: Iterable[int], answer: ToWorker) -> None:
        for worker in sorted(workers):
            self._send(worker, answer)


class LoopbackPort:
    """A port on loopback that the system chose and keeps for one job. Final.

    It is bound as long as the job lives, so that the system gives it to no other program, but
    nothing listens until a store is needed. Until then a program of the job may listen there
    itself, with a ``TCPStore`` of its own or in a process that it starts (``SO_REUSEADDR``).

    Attributes:
        number: the port; None if the system has none, such as without a network.
        trouble: why it has none; otherwise empty.
    """

    def __init__(self) -> None:
        self.trouble = ""
        self.number: int | None = None
        self._socket: socket.socket | None = None
        try:
            self._socket = _bound()
            self.number = self._socket.getsockname()[1]
        except OSError as error:
            self.trouble = f"no port on {ADDRESS} could be had ({error.strerror})"

    def listen(self) -> socket.socket:
        """Listen here or, if the program itself does that, at another port.

        Returns:
            The socket, for the caller to close.

        Raises:
            OSError: there is no port to listen at.
        """
        listening, self._socket = self._socket or _bound(), None
        try:
            listening.listen(_BACKLOG)
        except OSError:
            self._socket = listening
            listening = _bound()
            listening.listen(_BACKLOG)
        return listening

    def close(self) -> None:
        """Give the port back."""
        if self._socket is not None:
            self._socket.close()


def _bound() -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((ADDRESS, 0))
    except OSError:
        bound.close()
        raise
    return bound
