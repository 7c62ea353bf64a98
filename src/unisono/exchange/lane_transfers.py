"""What a worker sends to those that add up the same pieces on other hosts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from unisono.exchange.communicator import BrokenError, Communicator, Transfer


class LaneTransfers:
    """Tensors to and from the other hosts' workers of one lane. Final.

    All methods are collective among these workers.

    Args:
        communicator: connects them.
        fail: raises the error that says who was lost, given what has failed.
    """

    def __init__(self, communicator: Communicator, fail: Callable[[str], None]) -> None:
        self._communicator, self._fail = communicator, fail

    def all_to_all(
        self, sent: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        """Send each host a vector, and get one of each; all of one dtype.

        Args:
            sent: by host.
            lengths: of what comes, by host, in elements.
        """
        received = sent[0].new_empty(sum(lengths))
        size = received.itemsize
        self._wait(
            self._communicator.all_to_all(
                received.view(torch.uint8),
                torch.cat(list(sent)).view(torch.uint8),
                from_each=[length * size for length in lengths],
                to_each=[one.numel() * size for one in sent],
            )
        )
        return _cut(received, lengths)

    def all_gather(self, own: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
        """Give every host a vector; get those of all.

        Args:
            own: this host's.
            lengths: of all, by host, in elements.
        """
        longest = max(lengths)
        padded = torch.zeros(longest, dtype=own.dtype)
        padded[: own.numel()] = own
        received = own.new_empty(longest * len(lengths))
        self._wait(
            self._communicator.all_gather(received.view(torch.uint8), padded.view(torch.uint8))
        )
        slots = _cut(received, [longest] * len(lengths))
        return [one[:length] for one, length in zip(slots, lengths, strict=True)]

    def _wait(self, transfer: Transfer) -> None:
        try:
            self._communicator.wait(transfer)
        except BrokenError as error:
            self._fail(str(error))


def _cut(vector: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    ends = itertools.accumulate(lengths)
    return [vector[end - length : end] for length, end in zip(lengths, ends, strict=True)]
