"""A cable between a host and the switch that is long and drops packets: a process carries them.

Not every kernel has tc's netem. Here both ends are taps; what comes in at one leaves at the other
some milliseconds later, or never.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
_FRAME_BYTES = 1 << 16


def plug_in(pid: int, name: str) -> int:
    """Make an interface in the network of a process; gives what carries its packets."""
    with open(f"/proc/{pid}/ns/net") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return end


def carry(ends: list[int], delay_s: float, loss: float) -> None:
    """Carry packets from each end to the other one, for ever."""
    chance = random.Random(0)
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait_s)[0]:
            packet = os.read(end, _FRAME_BYTES)
            if chance.random() >= loss:
                other = ends[1 - ends.index(end)]
                under_way.append((time.monotonic() + delay_s, other, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, other, packet = under_way.popleft()
            with contextlib.suppress(OSError):  # that end is not up, or its host has no room
                os.write(other, packet)


if __name__ == "__main__":
    host, switch, host_end, switch_end, delay_ms, loss_percent = sys.argv[1:]
    both = [plug_in(int(host), host_end), plug_in(int(switch), switch_end)]
    print("plugged in", flush=True)
    carry(both, float(delay_ms) / 1000, float(loss_percent) / 100)
