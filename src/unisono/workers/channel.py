"""How do the processes of one host talk? In frames over a pair of AF_UNIX stream sockets.

A frame is a JSON header, optional bytes, and optional file descriptors::

    | header size u32 | payload size u64 | descriptors u32 | header (JSON) | payload |
      descriptors travel beside the frame's first bytes (SCM_RIGHTS), in order

Invariant: a receiver sees whole frames or the end, never a part of one; every descriptor that
arrives is close-on-exec and belongs to exactly one message. Nothing here unpickles.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PREFIX = struct.Struct("!IQI")
_CHUNK_BYTES = 1 << 18
MAX_HEADER_BYTES = 1 << 26
MAX_PAYLOAD_BYTES = 1 << 36
MAX_DESCRIPTORS = 32
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


@dataclass(frozen=True, slots=True)
class Message:
    """One frame as it arrived; whoever takes it owns its descriptors.

    Attributes:
        header: the decoded JSON object.
        payload: the bytes that followed it.
        fds: the descriptors that came along, in the order they were sent.
    """

    header: dict[str, Any]
    payload: bytes = b""
    fds: tuple[int, ...] = ()


class Channel:
    """One end of a socket pair. Not locked: one thread sends and receives at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._bytes = bytearray()
        self._fds: deque[int] = deque()
        self.at_end = False

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Make two connected ends, both close-on-exec."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take over an inherited or received descriptor; it becomes close-on-exec."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd))

    def fileno(self) -> int:
        """Return the descriptor, for selectors and for passing the end on."""
        return self._socket.fileno()

    def send(self, header: dict[str, Any], payload: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send one frame; blocks while the other side's buffer is full.

        Raises:
            ValueError: the frame is larger than a receiver accepts.
            ConnectionError: the other end is closed: BrokenPipeError, or ConnectionResetError
                when it left frames unread.
        """
        encoded = json.dumps(header).encode("ascii")
        _check_sizes(len(encoded), len(payload), len(fds))
        prefix = _PREFIX.pack(len(encoded), len(payload), len(fds)) + encoded
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self._socket.sendmsg([prefix], rights)
        # A frame's first byte carries the descriptors; what did not fit follows without them.
        self._socket.sendall(prefix[sent:])
        if payload:
            self._socket.sendall(payload)

    def receive(self) -> Message | None:
        """Wait for one message; None when the other end closed between two frames.

        Raises:
            ConnectionError: the other end closed in the middle of a frame.
        """
        while (message := self._take()) is None:
            if not self._read(0):
                if self._bytes:
                    raise ConnectionError(
                        f"a message must be whole, but the sender left after {len(self._bytes)} "
                        "bytes of it: look for what ended the other process."
                    )
                return None
        return message

    def receive_ready(self) -> list[Message]:
        """Take what has arrived, without waiting; sets ``at_end`` once the other end is closed.

        A frame that its sender did not live to finish is dropped.
        """
        messages = []
        while not self.at_end:
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            while (message := self._take()) is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        """Close this end and every descriptor that arrived but was not taken."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())

    def detach(self) -> int:
        """Give up the descriptor without closing it, and return it."""
        return self._socket.detach()

    def _read(self, flags: int) -> bool:
        """Append what one recvmsg gives; False at the end."""
        try:
            # Not socket.recv_fds: Python 3.10 and 3.11 ignore its flags.
            data, ancillary, _, _ = self._socket.recvmsg(
                _CHUNK_BYTES, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            # The other end closed with our frames unread; for us that is its end.
            data, ancillary = b"", []
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)
        self._bytes += data
        self.at_end = not data
        return bool(data)

    def _take(self) -> Message | None:
        """Cut one whole frame off the front of what has arrived."""
        if len(self._bytes) < _PREFIX.size:
            return None
        header_size, payload_size, num_fds = _PREFIX.unpack_from(self._bytes)
        _check_sizes(header_size, payload_size, num_fds)
        header_end = _PREFIX.size + header_size
        frame_end = header_end + payload_size
        if len(self._bytes) < frame_end or len(self._fds) < num_fds:
            return None
        header = json.loads(self._bytes[_PREFIX.size : header_end])
        payload = bytes(memoryview(self._bytes)[header_end:frame_end])
        del self._bytes[:frame_end]
        return Message(header, payload, tuple(self._fds.popleft() for _ in range(num_fds)))


def _check_sizes(header_size: int, payload_size: int, num_fds: int) -> None:
    for what, size, limit in (
        ("header bytes", header_size, MAX_HEADER_BYTES),
        ("payload bytes", payload_size, MAX_PAYLOAD_BYTES),
        ("descriptors", num_fds, MAX_DESCRIPTORS),
    ):
        if size > limit:
            raise ValueError(
                f"a message must have at most {limit} {what}, but has {size}: send less at once, "
                "or write it to a file and send its path."
            )
