"""Which parameters travel together: neighbours, from the last to the first.

A backward pass finishes the last parameters first, so their bucket can travel while the rest is
still computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

FIRST_BYTES, BUCKET_BYTES = 1 << 20, 4 << 20


def bucket_ranges(
    sizes: Sequence[int], first_bytes: int = FIRST_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[range]:
    """Cut parameters, from the last to the first, where a bucket is full.

    Args:
        sizes: the bytes of each parameter.
        first_bytes: what the first bucket has at least, if there is so much.
        bucket_bytes: what each other bucket has at least.
    """
    stop, num_bytes, full_bytes = len(sizes), 0, first_bytes
    for index in reversed(range(len(sizes))):
        num_bytes += sizes[index]
        if num_bytes >= full_bytes or index == 0:
            yield range(index, stop)
            stop, num_bytes, full_bytes = index, 0, bucket_bytes
