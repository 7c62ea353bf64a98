"""How do workers of different hosts communicate? Over one connection per pair of workers.

Each worker listens on one address until all have connected. Both sides of a connection prove that
they know the job's token, hashed with their ranks. Others are rejected, and delay no one.

A frame is its length (u32) followed by that many bytes. There are no heartbeats: the kernel probes
a silent host, and a connection fails if it is not acknowledged for some seconds. So a stopped
worker is not mistaken for a lost host.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from unisono.errors import RendezvousError
from unisono.runtime import __version__
from unisono.runtime.timeouts import RENDEZVOUS
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.rendezvous import Rendezvous

# After this long without a sign of life a host, or the link to it, counts as lost. A link that is
# cut for five seconds survives: the kernel resends unacknowledged data every second.
LOST_AFTER_S = 8.0
_TCP_RTO_MAX_MS, _RTO_MS = 44, 1000  # not defined in Python; older kernels reject it
_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<I32s")
_READ_BYTES = 1 << 18
_ANSWERS_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.1
_BUFFER_BYTES = 1 << 20
_BACKLOG, _CALLERS_AT_MOST = 128, 256

# Where a worker listens: address and port.
Address = Sequence[Any]


@final
class HostLinks:
    """One worker's connections to those of other hosts. Made by :func:`connect_hosts`."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._incoming = {rank: bytearray() for rank in sockets}
        self._outgoing = {rank: bytearray() for rank in sockets}
        self._poll = select.poll()
        self._rank_of = {}
        for rank, link in self._sockets.items():
            watch_link(link)
            self._rank_of[link.fileno()] = rank
            self._poll.register(link, select.POLLIN)

    def send(self, frame: bytes) -> None:
        """Send a frame to every worker of other hosts, as far as the kernel accepts it now."""
        data = _LENGTH.pack(len(frame)) + frame
        for rank in list(self._sockets):
            self._outgoing[rank] += data
            self._flush(rank)

    def receive(self, timeout_s: float) -> Iterator[tuple[int, bytes | Departure]]:
        """Yield (rank, frame) as frames arrive within `timeout_s`, or (rank, how it was lost)."""
        for rank in list(self._sockets):
            self._flush(rank)
        for fd, _ in self._poll.poll(timeout_s * 1000):
            rank = self._rank_of[fd]
            gone = self._read(rank)
            yield from ((rank, frame) for frame in self._frames(rank))
            if gone is not None:
                self._drop(rank)
                yield rank, gone

    def close(self) -> None:
        """Close all connections."""
        for rank in list(self._sockets):
            self._drop(rank)

    def _read(self, rank: int) -> Departure | None:
        """Read what has arrived; return how the worker was lost, or None."""
        link, incoming = self._sockets[rank], self._incoming[rank]
        try:
            while chunk := link.recv(_READ_BYTES):
                incoming += chunk
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return Departure.DIED
        except OSError:
            return Departure.UNREACHABLE
        return Departure.DIED

    def _flush(self, rank: int) -> None:
        """Send what is buffered; :meth:`_read` notices errors."""
        outgoing = self._outgoing[rank]
        with contextlib.suppress(OSError):
            while outgoing:
                del outgoing[: self._sockets[rank].send(outgoing)]

    def _frames(self, rank: int) -> Iterator[bytes]:
        incoming = self._incoming[rank]
        while len(incoming) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(incoming)[0]
            if len(incoming) < end:
                return
            yield bytes(incoming[_LENGTH.size : end])
            del incoming[:end]

    def _drop(self, rank: int) -> None:
        link = self._sockets.pop(rank)
        self._poll.unregister(link)
        link.close()


def connect_hosts(rendezvous: Rendezvous, address: str) -> HostLinks:
    """Connect this worker to every worker of other hosts. Collective: every rank calls it."""
    places, token = rendezvous.places, rendezvous.token
    others = set(range(places.world_size)) - set(places.local_ranks)

    def tell(place: Address) -> dict[int, tuple[Address, str]]:
        told = rendezvous.gather("addresses of workers", [__version__, place])
        for rank, (version, _) in enumerate(told):
            if version != told[0][0]:
                raise RendezvousError(
                    f"all hosts must have one version of Unisono, but rank 0 has {told[0][0]} and "
                    f"rank {rank} has {version}: install the same on all."
                )
        return {rank: (told[rank][1], token) for rank in others}

    def look() -> None:
        rendezvous.watch(0.0)

    me, within_s = places.rank, RENDEZVOUS.in_s()
    return HostLinks(connect_ranks(me, address, token, tell, look, within_s))


def connect_ranks(
    me: int,
    address: str,
    token: str,
    tell: Callable[[Address], Mapping[int, tuple[Address, str]]],
    look: Callable[[], None],
    within_s: float,
) -> dict[int, socket.socket]:
    """Connect this worker to others; of each pair, the higher rank connects to the lower one.

    It listens only at `address`, until all have connected. `tell` publishes where it listens, and
    returns the address and token of each of the others.
    """
    links: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=_BACKLOG) as listening:
        others = tell(listening.getsockname()[:2])
        deadline = time.monotonic() + within_s
        try:
            for rank in sorted(rank for rank in others if rank < me):
                links[rank] = _call_rank(rank, *others[rank], me, deadline)
            above = {rank for rank in others if rank > me}
            links.update(_take_calls(listening, above, me, token, look, deadline))
        except BaseException:
            for link in links.values():
                link.close()
            raise
    return links


def _call_rank(rank: int, place: Address, token: str, me: int, deadline: float) -> socket.socket:
    """Connect to a worker until `deadline` (``time.monotonic``); both sides prove the token."""
    link = None
    try:
        left_s = max(0.1, deadline - time.monotonic())
        link = socket.create_connection((place[0], place[1]), min(LOST_AFTER_S, left_s))
        link.settimeout(min(_ANSWERS_WITHIN_S, left_s))
        link.sendall(_HELLO.pack(me, _shown(token, me, rank)))
        _, shown = _HELLO.unpack(_exactly(link, _HELLO.size))
    except OSError as error:
        if link is not None:
            link.close()
        seen = f"rank {me} does not reach rank {rank} at {place[0]}:{place[1]} ({error})"
        raise _unreached(seen) from error
    if not hmac.compare_digest(shown, _shown(token, rank, me)):
        link.close()
        raise RendezvousError(
            f"rank {rank} must be at {place[0]}:{place[1]}, but the process there does not know "
            f"the job's token: check for another job that uses this address."
        )
    return link


def _take_calls(
    listening: socket.socket,
    missing: set[int],
    me: int,
    token: str,
    look: Callable[[], None],
    deadline: float,
) -> Iterator[tuple[int, socket.socket]]:
    listening.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    try:
        while missing:
            look()
            if time.monotonic() >= deadline:
                here = listening.getsockname()[0]
                raise _unreached(f"ranks {sorted(missing)} have not reached rank {me} at {here}")
            for key, _ in selector.select(_LOOK_EVERY_S):
                if key.data is None:
                    _let_in(listening, selector)
                    continue
                caller, hello = key.data
                rank = _greet(caller, hello, me, token)
                if rank is not None:
                    selector.unregister(caller)
                    if rank in missing:
                        missing.remove(rank)
                        yield rank, caller
                    else:
                        caller.close()
    finally:
        for caller in _callers(selector):
            caller.close()
        selector.close()


def _unreached(seen: str) -> RendezvousError:
    return RendezvousError(
        f"every host must reach the others, but {seen}: name the interface that connects the hosts "
        f"with UNISONO_INTERFACE, and let the firewall pass connections between them."
    )


def _let_in(listening: socket.socket, selector: selectors.BaseSelector) -> None:
    """Accept a connection; close the oldest if too many have not identified themselves."""
    with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
        caller, _ = listening.accept()
        caller.setblocking(False)
        selector.register(caller, selectors.EVENT_READ, (caller, bytearray()))
    for caller in _callers(selector)[:-_CALLERS_AT_MOST]:
        selector.unregister(caller)
        caller.close()


def _callers(selector: selectors.BaseSelector) -> list[socket.socket]:
    return [key.data[0] for key in selector.get_map().values() if key.data is not None]


def _greet(caller: socket.socket, hello: bytearray, me: int, token: str) -> int | None:
    """Answer a caller. Return its rank, -1 if it lacks the token, or None if data is missing."""
    with contextlib.suppress(OSError):
        while len(hello) < _HELLO.size:
            try:
                chunk = caller.recv(_HELLO.size - len(hello))
            except BlockingIOError:
                return None
            if not chunk:
                return -1
            hello += chunk
        rank, shown = _HELLO.unpack(hello)
        if hmac.compare_digest(shown, _shown(token, rank, me)):
            caller.sendall(_HELLO.pack(me, _shown(token, me, rank)))
            return int(rank)
    return -1


def _shown(token: str, rank: int, to: int) -> bytes:
    return hmac.digest(token.encode(), f"rank {rank} to {to}".encode(), "sha256")


def _exactly(link: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        chunk = link.recv(num_bytes - len(data))
        if not chunk:
            raise ConnectionResetError("the connection was closed")
        data += chunk
    return data


def watch_link(link: socket.socket) -> None:
    """Make a connection non-blocking, and let the kernel detect the loss of the other host."""
    link.setblocking(False)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    notice_lost_host(link)


def notice_lost_host(link: socket.socket) -> None:
    """Make a connection fail once the other host is gone."""
    tcp = socket.IPPROTO_TCP
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(tcp, socket.TCP_KEEPIDLE, 1)
    link.setsockopt(tcp, socket.TCP_KEEPINTVL, 1)
    link.setsockopt(tcp, socket.TCP_KEEPCNT, int(LOST_AFTER_S))
    link.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(1000 * LOST_AFTER_S))
    resend_soon(link)


def notice_lost_store(port: int) -> None:
    """Make waits for a store's answer fail once its host is gone; torch has no option for it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with (
            contextlib.suppress(OSError),
            socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as link,
        ):
            if link.getpeername()[1:2] == (port,):  # a string for a local socket
                notice_lost_host(link)


def resend_soon(link: socket.socket) -> None:
    """Resend unacknowledged data every second if the kernel supports it."""
    with contextlib.suppress(OSError):
        link.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MS)
