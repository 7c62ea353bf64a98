"""Give up transfers that stay slow, or that bring more bytes than the file has.

A socket's timeout counts from one byte to the next, so a server that sends a byte now and then
would be waited for for days, and one that never ends would fill the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

# A modem's pace: MNIST's largest file then takes half an hour. Slower must last for SLOW_S, as a
# connection that stumbles recovers within seconds.
SLOWEST_BYTES_PER_S = 5_000
SLOW_S = 30.0


class TransferGivenUpError(Exception):
    """A transfer would not come to its end in a sane time, or not to that of the file."""


def watched(
    read: Callable[[], bytes],
    num_bytes: int,
    *,
    slow_s: float = SLOW_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[bytes]:
    """Give what comes, piece by piece.

    Args:
        read: waits for some bytes and gives them; none at the end.
        num_bytes: how many there are at most.
        slow_s: how long fewer than :data:`SLOWEST_BYTES_PER_S` may come.
        clock: gives the time in seconds.

    Raises:
        TransferGivenUpError: it is slow for longer, or there are more bytes.
    """
    total = seen = 0
    seen_at_s = clock()
    while piece := read():
        total += len(piece)
        if total > num_bytes:
            raise TransferGivenUpError(f"what came is larger than the file's {num_bytes:,} bytes")
        yield piece
        seconds = clock() - seen_at_s
        if seconds >= slow_s and total < num_bytes:
            if total - seen < SLOWEST_BYTES_PER_S * seconds:
                raise TransferGivenUpError(
                    f"too slow: {total - seen:,} bytes in {seconds:.3g} s, where "
                    f"{SLOWEST_BYTES_PER_S:,} a second are the least"
                )
            seen, seen_at_s = total, clock()
