"""At which port do the ranks meet? At one on loopback that the system chose for the job.

It is bound as long as the job lives, so that the system gives it to no other program, but nothing
listens until a store is needed. Until then a program of the job may listen there itself, with a
``TCPStore`` of its own or in a process that it starts (``SO_REUSEADDR`` allows that to both).
"""

from __future__ import annotations

import socket

ADDRESS = "127.0.0.1"
_BACKLOG = 1024


class LoopbackPort:
    """A port that is kept for one job. Final.

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
