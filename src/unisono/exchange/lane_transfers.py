"""Tensors to and from those that add up the same pieces on other hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from unisono.device import bytes_of

Views = Sequence[memoryview]
Swap = Callable[[Mapping[int, Views], Mapping[int, Views]], None]
"""Sends bytes to other hosts, and waits until theirs are in memory; both by host."""


class LaneTransfers:
    """What the workers of a lane send each other. Final.

    All methods are collective among these workers.

    Args:
        swap: moves bytes, or raises the error that says who was lost.
        host: of this worker.
    """

    def __init__(self, swap: Swap, host: int) -> None:
        self._swap, self._host = swap, host

    def all_to_all(
        self, sent: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        """Send each host a vector, and get one of each; all of one dtype.

        Args:
            sent: by host; this one's is not looked at.
            lengths: of what comes, by host, in elements.
        """
        received = [sent[0].new_empty(length) for length in lengths]
        others = [host for host in range(len(sent)) if host != self._host]
        self._swap(
            {host: [bytes_of(sent[host])] for host in others},
            {host: [bytes_of(received[host])] for host in others},
        )
        return received

    def all_gather(self, own: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Give every host a vector; get those of all.

        Args:
            own: this host's.
            lengths: of all, by host, in elements.
        """
        received = self.all_to_all([own] * len(lengths), lengths)
        received[self._host] = own
        return received
