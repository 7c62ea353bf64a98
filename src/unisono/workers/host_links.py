"""How do workers of different hosts hear from each other? Over one connection for each two of them.

A worker listens on one address while the job begins. Whoever connects shows the job's token, hashed
with its rank, and gets the answer hashed likewise. When all have connected nobody listens any more.

Frames are a length (u32) and that many bytes. Nothing is sent while nobody has something to say:
the kernel asks whether a silent host is still there, and a connection that is not acknowledged for
some seconds fails. So nobody computes slower for being watched, and a stopped worker is not taken
for a lost host.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping

from unisono.errors import RendezvousError
from unisono.timeouts import RENDEZVOUS
from unisono.workers.meeting_point import Departure
from unisono.workers.rendezvous import Rendezvous

# After so long without a sign of life a host, or the link to it, is taken for lost. A link that is
# cut for five seconds is survived: what was sent meanwhile is sent again every second.
LOST_AFTER_S = 8.0
_TCP_RTO_MAX_MS, _RTO_MS = 44, 1000  # not in Python; older kernels refuse it
_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<I32s")
_READ_BYTES = 1 << 18
_HELLO_WITHIN_S = 5.0
_ANSWERS_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.1
_BUFFER_BYTES = 1 << 20


class HostLinks:
    """One worker's connections to those of other hosts. Final; made by :func:`connect_hosts`.

    Args:
        sockets: connected, by rank.
    """

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
        """Send a frame to every worker of other hosts, as far as the kernel takes it now."""
        data = _LENGTH.pack(len(frame)) + frame
        for rank in list(self._sockets):
            self._outgoing[rank] += data
            self._flush(rank)

    def receive(self, timeout_s: float) -> Iterator[tuple[int, bytes | Departure]]:
        """Give the frames that come within so many seconds, at once if there are any.

        Returns:
            Ranks with what they have sent, or how they are lost.
        """
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
        """End all connections."""
        for rank in list(self._sockets):
            self._drop(rank)

    def _read(self, rank: int) -> Departure | None:
        """Read what has come; gives how the worker is lost, if it is."""
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
        """Send what is left; an error is noticed where the connection is read."""
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
    """Connect this worker with every one of other hosts. Collective: every rank calls it.

    Args:
        rendezvous: where all workers have met.
        address: of this host, where the others reach it; nothing else is listened on.

    Raises:
        RendezvousError: another host cannot be reached.
    """
    places, deadline = rendezvous.places, time.monotonic() + RENDEZVOUS.in_s()
    mine = set(places.local_ranks)
    others = [rank for rank in range(places.world_size) if rank not in mine]
    links: dict[int, socket.socket] = {}
    with (
        socket.create_server((address, 0), backlog=len(others)) as listening,
        closed_on_error(links),
    ):
        ports = rendezvous.gather("addresses of workers", list(listening.getsockname()[:2]))
        me, token = places.rank, rendezvous.token
        for rank in (rank for rank in others if rank < me):
            links[rank] = call_rank(rank, ports[rank], me, token, deadline)
        while missing := [rank for rank in others if rank not in links]:
            rendezvous.watch(0.0)
            links |= take_call(listening, missing, me, token, deadline)
        return HostLinks(links)


@contextlib.contextmanager
def closed_on_error(links: Mapping[int, socket.socket]) -> Iterator[None]:
    """Close connections if not all can be made."""
    try:
        yield
    except BaseException:
        for link in links.values():
            link.close()
        raise


def call_rank(
    rank: int, place: tuple[str, int], me: int, token: str, deadline: float
) -> socket.socket:
    """Connect to a worker that listens, until a time of ``time.monotonic``; both show the token.

    Raises:
        RendezvousError: it is not reached there.
    """
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
        raise RendezvousError(
            f"every host must reach the others, but rank {me} does not reach rank {rank} at "
            f"{place[0]}:{place[1]} ({error}): name the interface that connects the hosts with "
            f"UNISONO_INTERFACE, and let the firewall pass connections between them."
        ) from error
    if not hmac.compare_digest(shown, _shown(token, rank, me)):
        link.close()
        raise RendezvousError(
            f"rank {rank} must be at {place[0]}:{place[1]}, but who answers there does not know "
            f"the job's token: look for another job that uses this address."
        )
    return link


def take_call(
    listening: socket.socket, missing: list[int], me: int, token: str, deadline: float
) -> dict[int, socket.socket]:
    """Take a connection, by its rank, if one comes soon; without the token it is turned away.

    Raises:
        RendezvousError: nobody has connected until then.
    """
    listening.settimeout(_LOOK_EVERY_S)
    try:
        link, _ = listening.accept()
    except TimeoutError as error:
        if time.monotonic() < deadline:
            return {}
        raise RendezvousError(
            f"every host must reach the others, but ranks {missing} have not reached rank {me} at "
            f"{listening.getsockname()[0]}: name the interface that connects the hosts with "
            f"UNISONO_INTERFACE, and let the firewall pass connections between them."
        ) from error
    with contextlib.suppress(OSError):
        link.settimeout(_HELLO_WITHIN_S)
        rank, shown = _HELLO.unpack(_exactly(link, _HELLO.size))
        if rank in missing and hmac.compare_digest(shown, _shown(token, rank, me)):
            link.sendall(_HELLO.pack(me, _shown(token, me, rank)))
            return {rank: link}
    link.close()
    return {}


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
    """Be ready to send and receive, and have the kernel notice when the other host is gone."""
    link.setblocking(False)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    notice_lost_host(link)


def notice_lost_host(link: socket.socket) -> None:
    """Have a connection fail when the other host is gone."""
    tcp = socket.IPPROTO_TCP
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(tcp, socket.TCP_KEEPIDLE, 1)
    link.setsockopt(tcp, socket.TCP_KEEPINTVL, 1)
    link.setsockopt(tcp, socket.TCP_KEEPCNT, int(LOST_AFTER_S))
    link.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(1000 * LOST_AFTER_S))
    with contextlib.suppress(OSError):
        link.setsockopt(tcp, _TCP_RTO_MAX_MS, _RTO_MS)
