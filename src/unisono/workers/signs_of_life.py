"""Is anybody there, where no connection is left? The kernel of the other host answers.

A worker that waits to be connected again, or still runs the program up to there, listens at an
address that it leaves in the store. Whoever waits for it connects, and says nothing: however busy
or stopped the worker is, its kernel answers as long as both are there.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from typing import TYPE_CHECKING

from unisono.workers.host_links import LOST_AFTER_S, watch_link

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BACKLOG = 4096


class SignsOfLife:
    """What one worker shows to the others, and sees of them. Final.

    Args:
        store: has everybody's addresses.
        rank: this worker.
        address: of this host, where the others reach it.
    """

    def __init__(self, store: Store, rank: int, address: str) -> None:
        self._store, self._rank, self._address = store, rank, address
        self._listening: socket.socket | None = None
        self._links: dict[int, socket.socket] = {}
        self._places: dict[int, str] = {}
        self._silent_since_s: dict[int, float] = {}

    def show(self) -> None:
        """Be seen from now on."""
        if self._listening is None:
            self._listening = socket.create_server((self._address, 0), backlog=_BACKLOG)
            place = json.dumps(self._listening.getsockname()[:2])
            self._store.set(_key(self._rank), place)

    def hide(self) -> None:
        """Be seen no more, nor look at anybody, as all are connected."""
        for link in self._links.values():
            link.close()
        if self._listening is not None:
            self._listening.close()
        self._listening = None
        self._links.clear()
        self._silent_since_s.clear()

    def silent_s(self, rank: int) -> float:
        """Tell for how long nobody with a rank has been seen, as far as this worker has looked."""
        place = self._store.get(_key(rank)).decode() if self._store.check([_key(rank)]) else ""
        if place != self._places.get(rank, ""):
            self._places[rank] = place
            self._call(rank, *json.loads(place))
        try:
            if rank in self._links:
                self._links[rank].recv(1)  # what nobody ever says
        except BlockingIOError:
            self._silent_since_s.pop(rank, None)
            return 0.0
        except ConnectionResetError:
            pass
        except OSError:
            return math.inf  # its kernel has been silent for long
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
