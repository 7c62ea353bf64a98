"""A connection between two processes of one job, which carries messages and descriptors.

A message is pickled and sent over a pair of AF_UNIX sockets, with the descriptors in `fds` attached
(SCM_RIGHTS); the receiver owns them. SOCK_SEQPACKET preserves message boundaries. A message that is
too long for a packet lies in a memfd: the packet is a marker, and the last descriptor the memfd's.
A receiver that may not open as many files loses the message: OSError (EMFILE).
"""

from __future__ import annotations

import array
import errno
import os
import pickle
import socket
from dataclasses import replace
from typing import Any

from unisono.runtime.workers.launcher_messages import Message

_IN_MEMORY = b"memory"  # no pickle starts with this
# Fits into socket buffers of any system configuration.
_PACKET_BYTES = 1 << 15
_MAX_DESCRIPTORS = 33  # of a message, including that of its memory
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)


class Channel:
    """One end of a socket pair. Not locked: only one thread may send or receive at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.at_end = False

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Create two connected ends, both close-on-exec."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take over an inherited or received descriptor, and make it close-on-exec."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fd))

    def fileno(self) -> int:
        """Return the descriptor, for selectors and for passing the end on."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message; blocks while the other side's buffer is full."""
        fds: tuple[int, ...] = getattr(message, "fds", ())
        packet = pickle.dumps(message)
        if len(packet) <= _PACKET_BYTES:
            self._send_packet(packet, fds)
            return
        with os.fdopen(os.memfd_create("unisono-message", os.MFD_CLOEXEC), "wb") as file:
            file.write(packet)
            file.flush()
            self._send_packet(_IN_MEMORY, (*fds, file.fileno()))

    def receive(self) -> Message | None:
        """Wait for one message; return None once the other end is closed."""
        return self._receive(0)

    def receive_ready(self) -> list[Message]:
        """Return the messages that have arrived; set ``at_end`` once the other end is closed."""
        messages = []
        while not self.at_end:
            try:
                message = self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if message is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _send_packet(self, packet: bytes, fds: tuple[int, ...]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([packet], rights)

    def _receive(self, flags: int) -> Message | None:
        try:
            # Not socket.recv_fds: Python 3.11 ignores its flags.
            data, ancillary, told, _ = self._socket.recvmsg(
                _PACKET_BYTES, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            # Raised once: the other end closed with messages unread. What it sent is there.
            return self._receive(flags)
        arrived = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                arrived.frombytes(content[: len(content) - len(content) % arrived.itemsize])
        if told & socket.MSG_CTRUNC:  # the kernel has dropped those beyond RLIMIT_NOFILE
            for fd in arrived:
                os.close(fd)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not data:
            self.at_end = True
            return None
        return _read(data, list(arrived))


def _read(packet: bytes, fds: list[int]) -> Message:
    if packet == _IN_MEMORY:
        with os.fdopen(fds.pop(), "rb", buffering=0) as file:
            file.seek(0)  # the offset is where the sender stopped writing
            packet = file.read()
    message: Any = pickle.loads(packet)
    whole: Message = replace(message, fds=tuple(fds)) if fds else message
    return whole
