"""Losses and scalars of a step that are still on an accelerator: read all at once.

Reading one number makes the host wait for all that the device has been given to do. So the numbers
of all shards are copied together, when the shards' passes have been issued.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from unisono.arrivals import pinned
from unisono.device import HOST, Copies
from unisono.step.loss import ShardLoss


class PendingLosses:
    """The losses of a step that have numbers on an accelerator. Final.

    Attributes:
        losses: by shard.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.losses: list[tuple[int, ShardLoss]] = []
        self._host = torch.empty(0, dtype=torch.float64, device=HOST)

    def read(self) -> Iterator[tuple[int, ShardLoss]]:
        """Give every shard's loss with its numbers, once all copies are made. Waits for the device.

        Raises:
            ValueError: a weight is negative.
        """
        losses, self.losses = self.losses, []
        tensors = [number.tensor for _, loss in losses for number in loss.on_device]
        if self._host.numel() != len(tensors):
            self._host = pinned(torch.empty(len(tensors), dtype=torch.float64, device=HOST))
        order: Sequence[int] = range(len(tensors))
        if tensors:  # a program may have brought all to the host
            together, order = _together(tensors, self._copies.device)
            self._copies.to_host(self._host, together)
            self._copies.wait()
        read = dict(zip(order, self._host.tolist(), strict=True))
        numbers = iter([read[at] for at in range(len(tensors))])
        for shard, loss in losses:
            yield shard, loss.with_numbers(numbers)


def _together(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, Sequence[int]]:
    """Make one vector of numbers on a device, and say which number is where."""
    places = defaultdict(list)
    for at, tensor in enumerate(tensors):
        places[tensor.device].append(at)
    stacks = [torch.stack([tensors[at] for at in each]).to(device) for each in places.values()]
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks), sum(places.values(), [])
