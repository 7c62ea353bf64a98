"""Memory of parameters that the program also refers to elsewhere.

`w = model.weight.data` in a regulariser, an array of numpy that a callback clips, a state dict that
was kept, rows `self.half = self.fc.weight[:4]`, weights that are views of one flat tensor of an
optimizer's own, a model that other processes read (`share_memory`). While a loop runs, parameters
lie elsewhere. So that memory is kept the same as they are: what a step updates is copied there, and
what the program changes there between steps counts as a change of the parameter. When the loop
ends, the parameters lie there again. Parameters whose memory has no other use are not tracked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

import torch

from unisono.runtime.device import bits_of


class _Reference(NamedTuple):
    """A parameter, the memory that it had before the loop, and what both were when last equal."""

    parameter: torch.Tensor
    there: torch.Tensor
    last: torch.Tensor


@final
class References:
    """The parameters of one loop whose memory is used elsewhere, before an exchange moves them.

    `others` are tensors that may share memory with them, such as buffers.

    Attributes:
        all: the parameters whose memory is used elsewhere.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        known = Counter(map(_storage, (*parameters, *others)))
        alone = _num_uses(torch.empty(1)) - 1
        self.all = [
            _Reference(one, one.data, one.data.clone())
            for one in parameters
            if one.numel() and (_is_shared(one) or _num_uses(one) - alone > known[_storage(one)])
        ]

    def take(self) -> None:
        """Make both memories equal between two steps, whichever of them the program has changed."""
        for parameter, there, last in self.all:
            here = parameter.data
            if here.shape == there.shape and not _is_same(there, last):
                bits, mine = bits_of(there), bits_of(here)
                mine.copy_(torch.where(bits != bits_of(last), bits, mine))
        self.show()

    def show(self) -> None:
        """Copy what a step has updated to the other memory."""
        for parameter, there, last in self.all:
            here = parameter.data
            is_same = _is_same(here, last) and _is_same(there, last)
            if here.shape == there.shape and not is_same:
                there.copy_(here)
                last.copy_(here)

    def close(self) -> None:
        """Move the parameters back to their former memory."""
        self.take()
        for parameter, there, _ in self.all:
            parameter.data = there
        self.all = []


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


def _is_shared(tensor: torch.Tensor) -> bool:
    # torch calls all memory of accelerators shared.
    return tensor.is_cpu and bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _num_uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
