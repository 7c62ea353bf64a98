"""What does a byte cost a core of this machine that goes to another host and is added up there?"""

from __future__ import annotations

import socket
import statistics
import threading
import time

import numpy as np

_BYTES = 16 << 20  # more than fits into caches
_TIMES = 5
_TIMEOUT_S = 10.0


def copying_cost_s() -> float:
    """Send bytes over loopback, receive, add up and copy them; give a byte's processor time.

    Other programs hardly change it, as their time does not count. It takes a tenth of a second.

    Raises:
        OSError: there is no loopback.
    """
    own, come, total = np.ones((3, _BYTES // 4), np.float32)
    costs_s = []
    sent, place = own.data.cast("B"), come.data.cast("B")
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), _TIMEOUT_S)
        server.settimeout(_TIMEOUT_S)
        receiver, came_from = server.accept()
    with sender, receiver:
        if came_from != sender.getsockname():
            raise ConnectionRefusedError(f"somebody else has connected from {came_from}")
        receiver.settimeout(_TIMEOUT_S)
        for _ in range(_TIMES):
            begun_s = time.process_time()
            thread = threading.Thread(target=sender.sendall, args=(sent,))
            thread.start()
            at = 0
            while at < _BYTES:
                at += receiver.recv_into(place[at:])
            thread.join()
            np.add(own, come, out=total)  # slices of two hosts
            own[:] = total  # into the room that is sent from, and
            come[:] = own  # out of it
            costs_s.append(time.process_time() - begun_s)
    return statistics.median(costs_s) / _BYTES
