"""Rows of predictions that come from a device: written while it computes the next ones.

::

    device   pass 0 │ pass 1 │ pass 2 │ …
    copies          └ rows 0 └ rows 1 …
    host     issue 0, issue 1, write 0, issue 2, write 1, …

On the CPU each row is written at once.
"""

from __future__ import annotations

import torch

from unisono.arrivals import pinned
from unisono.device import HOST, Device
from unisono.train.predictions import Output, Rows


class LateRows:
    """Writes the rows of one pass once the next one has been issued. Final."""

    def __init__(self, rows: Rows, device: Device) -> None:
        self._rows, self._device, self._copies = rows, device, device.copies()
        self._pending: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
        self._host: dict[str, torch.Tensor] = {}

    def write(self, indices: torch.Tensor, output: Output) -> None:
        """Write the rows of some samples, at the latest when :meth:`finish` is called.

        Raises:
            ValueError: they differ from what the first batch had.
        """
        self._rows.check(output)
        self.finish()
        if not all(self._device.has(tensor) for tensor in output.values()) or self._device.is_host:
            self._rows.write(indices, output)
            return
        here = {name: self._room_for(name, tensor) for name, tensor in output.items()}
        for name, tensor in output.items():
            self._copies.to_host(here[name], tensor.detach().contiguous())
        self._pending = indices, here

    def finish(self) -> None:
        """Write what has not been written yet. Waits for its pass, not for later ones."""
        if self._pending is not None:
            self._copies.wait()
            self._rows.write(*self._pending)
            self._pending = None

    def _room_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Give memory of the host with the shape of a tensor; rows before it have been written."""
        kept = self._host.get(name)
        if kept is None or len(kept) < len(tensor):
            kept = pinned(torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST))
            self._host[name] = kept
        return kept[: len(tensor)]
