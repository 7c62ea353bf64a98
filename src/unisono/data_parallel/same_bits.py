"""Have tensors on two devices the same bits? Found out without moving either of them.

Each device computes a mark of 64 bits of its own tensor, and the marks are compared: a sum of all
elements, as whole numbers, each times a fixed random number of its place. (Tensors of which one
element or more differ at random have the same mark once in 2⁶⁴ times.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BLOCK = 1 << 20  # elements; what is in between takes 8 bytes for each
_ODD = 0x9E3779B97F4A7C15 - 2**64  # of a block's place: 2⁶⁴ over the golden ratio
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def can_be_marked(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements can be read as whole numbers."""
    return tensor.layout == torch.strided and not tensor.is_quantized


class Comparison:
    """Compares tensors on two devices. Final; keeps 8 MiB on each device, once it was used."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, torch.Tensor] = {}

    def differing(self, ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[bool]:
        """Compare pairs of tensors of equal shapes and dtypes. The host waits for both devices.

        Returns:
            For each pair whether it differs.
        """
        if not ones:
            return []
        marks = [self._marks(ones), self._marks(others)]  # both before the first wait
        return [one != other for one, other in zip(*(each.tolist() for each in marks), strict=True)]

    def _marks(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        device = tensors[0].device
        if device not in self._factors:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator, device="cpu")
            self._factors[device] = drawn.mul_(2).add_(1).to(device)
        return torch.stack([_mark(tensor, self._factors[device]) for tensor in tensors])


def _mark(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    mark = factors.new_zeros(())
    for block in torch.split(_words(tensor), _BLOCK):
        mark = mark * _ODD + (block * factors[: len(block)]).sum()
    return mark


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements in a row, as whole numbers of their size."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().reshape(-1).view(_WORDS[tensor.itemsize])
