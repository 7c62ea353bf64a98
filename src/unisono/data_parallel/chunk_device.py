"""Where a chunk is computed: a device that is the current one meanwhile, with generators seeded.

Generators of the host and of all devices in use are as before when the chunks are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from unisono.device import HOST, Device
from unisono.plan.seeds import seed_of

_STREAM = "DataParallel"


class ChunkDevices:
    """The devices of one DataParallel. Final."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, Device] = {}

    @contextmanager
    def generators_put_back(self, devices: Iterable[torch.device]) -> Iterator[int]:
        """Draw one number for what is seeded inside, and leave generators as they were then."""
        number = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(self._of(device).generators_put_back())
            yield number

    @contextmanager
    def computing(self, device: torch.device, drawn: int, chunk: int) -> Iterator[None]:
        """Compute a chunk: its random numbers follow from the number drawn and the chunk."""
        with _as_current(device):
            self._of(device).seed(seed_of(_STREAM, drawn, chunk))
            yield

    def _of(self, device: torch.device) -> Device:
        if device not in self._devices:
            with _as_current(device):  # a Device makes itself the current one
                self._devices[device] = Device(device)
        return self._devices[device]


def _as_current(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if device.type == HOST else torch.accelerator.device_index(device.index)
