"""Connect a worker with the worker of the same lane on each other host.

Data is sent in frames: a number (u64) that identifies the frame, its length (u64), and its bytes.
The receiver registers each expected number with the length and the destination, so bytes are
copied once, out of the kernel. Unexpected frames stay in the kernel; a frame of unexpected length
breaks the lane. Nothing is unpickled.

Connections are made as those of the control block are (``workers/host_links.py``), with a secret
that workers have exchanged over the control block. Nobody listens once they are made.

A thread exchanges a lane's buckets during the backward pass, and ends with that. It inherits this
worker's rounding mode, so its additions give the same bits.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import final

from typing_extensions import override

from unisono.engine.exchange.bucket_pipeline import BucketPipeline
from unisono.engine.exchange.communicator import BrokenError, Carrier, Transfer
from unisono.engine.exchange.ready_buckets import ReadyBuckets
from unisono.errors import RendezvousError
from unisono.runtime.workers.host_links import Address, connect_ranks, resend_soon
from unisono.runtime.workers.team import Team

Views = Sequence[memoryview]
_HEADER = struct.Struct("<QQ")
_CONNECT_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.05
_PIECES_AT_ONCE = 16
_WAKE_BYTES = 1 << 17  # how much must arrive before this worker wakes, if so much is expected


@final
class HostLane(Carrier):
    """The connections of this worker to those of its lane; made by :func:`connect_lane`.

    Args:
        sockets: connected, by host; without this one.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._links = {host: _Link(host, link) for host, link in sockets.items()}
        self._by_fd = {link.fileno: link for link in self._links.values()}
        self._poll = select.poll()
        for fd in self._by_fd:
            self._poll.register(fd, 0)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.POLLIN)
        self._is_left = False

    def expect(self, number: int, into: Mapping[int, Views]) -> None:
        """Register where to store the bytes of a frame, by host, before they can arrive."""
        for host, views in into.items():
            self._links[host].expect(number, views)

    def swap(self, number: int, sent: Mapping[int, Views]) -> Transfer:
        """Start to send a frame to each host; an expected frame comes from each.

        Bytes must not change before the transfer is ready.
        """
        for host, views in sent.items():
            self._links[host].send(number, views)
        return _Swap(number, list(self._links.values()))

    def progress(self, at_most_s: float) -> None:
        """Move bytes; wait for some at most `at_most_s` seconds, or until :meth:`wake`."""
        # Python waits for threads that wait here before it ends.
        if self._is_left or not threading.main_thread().is_alive():
            raise BrokenError("this worker has left")
        for link in self._links.values():
            self._poll.modify(link.fileno, link.prepare())
        for fd, _ in self._poll.poll(at_most_s * 1000):
            if fd == self._bell:
                os.eventfd_read(fd)
            else:
                self._by_fd[fd].move()

    def wake(self) -> None:
        """Wake the thread that waits in :meth:`progress`; any thread may call this."""
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    @override
    def wait(self, transfer: Transfer, patience_s: float = math.inf) -> bool:
        until_s = time.monotonic() + patience_s
        while not transfer.is_ready:
            left_s = until_s - time.monotonic()
            if left_s < 0:
                return False
            self.progress(min(_LOOK_EVERY_S, left_s))
        return True

    def leave(self) -> None:
        """Stop all waits soon; any thread may call this."""
        self._is_left = True
        self.wake()

    def close(self) -> None:
        """Close the connections; workers that wait for this one get an error. Not collective."""
        self._is_left = True
        for link in self._links.values():
            link.close()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)


@final
class _Link:
    """One connection, with the frames to send and those expected."""

    def __init__(self, host: int, connected: socket.socket) -> None:
        self._host, self._socket, self.fileno = host, connected, connected.fileno()
        self._outgoing: deque[tuple[int, memoryview]] = deque()
        self._sending: dict[int, int] = {}  # frames → how many pieces of them are left
        self._expected: dict[int, Views] = {}
        self._head = bytearray(_HEADER.size)
        self._number: int | None = None  # of the frame that comes
        self._incoming = deque([memoryview(self._head)])
        self._wakes_at = 1  # SO_RCVLOWAT

    def prepare(self) -> int:
        """Return the events to poll for; set how many bytes wake this worker."""
        reads = select.POLLIN if self._expected and self._incoming else 0
        wakes_at = min(_WAKE_BYTES, sum(view.nbytes for view in self._incoming))
        if reads and wakes_at != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)
            self._wakes_at = wakes_at
        return reads | (select.POLLOUT if self._outgoing else 0)

    def is_done_with(self, number: int) -> bool:
        return number not in self._sending and number not in self._expected

    def expect(self, number: int, into: Views) -> None:
        self._expected[number] = into
        if self._number == number and not self._incoming:
            self._begin()

    def send(self, number: int, views: Views) -> None:
        num_bytes = sum(view.nbytes for view in views)
        head = memoryview(_HEADER.pack(number, num_bytes))
        pieces = [view for view in (head, *views) if view.nbytes]
        self._outgoing.extend((number, view) for view in pieces)
        self._sending[number] = len(pieces)
        self._send()

    def move(self) -> None:
        self._send()
        try:
            while self._incoming and self._expected:
                view = self._incoming[0]
                count = self._socket.recv_into(view)
                if not count:
                    raise BrokenError(f"host {self._host} has closed its connection")
                if count < view.nbytes:
                    self._incoming[0] = view[count:]
                else:
                    self._incoming.popleft()
                if not self._incoming:
                    self._end()
        except BlockingIOError:
            return
        except OSError as error:
            raise BrokenError(f"host {self._host}: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def _send(self) -> None:
        try:
            while self._outgoing:
                some = itertools.islice(self._outgoing, _PIECES_AT_ONCE)
                self._have_sent(self._socket.sendmsg([view for _, view in some]))
        except BlockingIOError:
            return
        except OSError as error:
            raise BrokenError(f"host {self._host}: {error}") from error

    def _have_sent(self, count: int) -> None:
        while count:
            number, view = self._outgoing.popleft()
            if count < view.nbytes:
                self._outgoing.appendleft((number, view[count:]))
                return
            count -= view.nbytes
            self._sending[number] -= 1
            if not self._sending[number]:
                del self._sending[number]

    def _end(self) -> None:
        if self._number is not None:
            del self._expected[self._number]
            self._number = None
            self._incoming.append(memoryview(self._head))
            return
        self._number = _HEADER.unpack(self._head)[0]
        if self._number in self._expected:
            self._begin()

    def _begin(self) -> None:
        number, num_bytes = _HEADER.unpack(self._head)
        views = self._expected[number]
        expected = sum(view.nbytes for view in views)
        if num_bytes != expected:
            raise BrokenError(
                f"host {self._host} must send {expected} bytes as number {number}, not {num_bytes}"
            )
        self._incoming.extend(view for view in views if view.nbytes)
        if not self._incoming:
            self._end()


@final
class _Swap(Transfer):
    """A frame to each host, and one from each."""

    def __init__(self, number: int, links: list[_Link]) -> None:
        self._number, self._links = number, links

    @property
    @override
    def is_ready(self) -> bool:
        self._links = [link for link in self._links if not link.is_done_with(self._number)]
        return not self._links

    @override
    def join(self) -> None:
        return


def connect_lane(team: Team, ranks: Sequence[int]) -> HostLane | None:
    """Connect the workers of a lane. Collective: every worker of every host calls it.

    Args:
        ranks: those of this worker's lane, by host; empty: it has none.
    """
    if not ranks:
        team.gather(b"", "addresses")
        return None
    me, secret = team.world.rank, secrets.token_hex(16)

    def tell(place: Address) -> dict[int, tuple[Address, str]]:
        heard = team.gather(json.dumps([place, secret]).encode(), "addresses")
        return {rank: json.loads(heard[rank]) for rank in ranks if rank != me}

    def look() -> None:
        if team.has_lost:
            raise BrokenError("a worker was lost while lanes were connected")

    try:
        links = connect_ranks(me, team.supervisor.address, secret, tell, look, _CONNECT_WITHIN_S)
    except RendezvousError as error:
        raise BrokenError(str(error)) from error
    for link in links.values():
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # No timeout here: a slow host may not read for a while.
        resend_soon(link)
    return HostLane({ranks.index(rank): link for rank, link in links.items()})


# The progress of the host's other workers must be polled; each poll takes 50 µs.
_LOOK_AT_TURN_EVERY_S, _LOOK_EVERY_WHILE_IDLE_S = 5e-3, 5e-4


@final
class LaneTurn(threading.Thread):
    """Sends buckets as they become ready, and ends with all sums received; starts immediately.

    Args:
        pipeline, lane: used by this thread alone until it has ended.
        ready: the buckets of all lanes.
        num_ready: returns how many buckets of this lane are ready.
    """

    def __init__(
        self,
        pipeline: BucketPipeline,
        lane: HostLane,
        ready: ReadyBuckets,
        num_ready: Callable[[], int],
        num_buckets: int,
    ) -> None:
        super().__init__(name="unisono-lane")
        self._pipeline, self._lane, self._ready = pipeline, lane, ready
        self._num_ready, self._num_buckets = num_ready, num_buckets
        self.error: BaseException | None = None
        ready.tell = lane.wake
        self.start()

    @override
    def run(self) -> None:
        pipeline, lane = self._pipeline, self._lane
        try:
            while (num_ready := self._num_ready()) < self._num_buckets and not pipeline.failure:
                pipeline.send(num_ready, lane)
                # A poll slows the worker's passes down; after them the core is free.
                is_idle = self._ready.has_all
                lane.progress(_LOOK_EVERY_WHILE_IDLE_S if is_idle else _LOOK_AT_TURN_EVERY_S)
            pipeline.finish(lane)
        except BrokenError as error:
            pipeline.failure = pipeline.failure or str(error)
        except BaseException as error:
            self.error = error
