"""What torch's callers pass: tensors of any shape and stride as contiguous vectors, and back."""

from __future__ import annotations

from typing import Any

import torch


def check_movable(tensor: torch.Tensor) -> None:
    """Refuse tensors that are sparse or not on the CPU."""
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"the backend `unisono` moves dense tensors, but got one with layout {tensor.layout}: "
            f"call `to_dense()` first, or for gradients of a DistributedDataParallel take that of "
            f"unisono, which averages sparse ones too."
        )
    if not tensor.is_cpu:
        raise TypeError(
            f"the backend `unisono` moves CPU tensors, but got one on {tensor.device}: use nccl "
            f"or gloo for it."
        )


def listed(tensors: Any) -> list[torch.Tensor]:
    """Take a tensor for a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def nested(lists: Any) -> list[list[torch.Tensor]]:
    """Take a list for a list of one list."""
    return [lists] if isinstance(lists[0], torch.Tensor) else lists


class Vectors:
    """The vectors of one call; its result, and the tensors of which some are copies. Final.

    A vector views a tensor's memory, whatever ``.data`` the program gives the tensor later. Where
    elements do not lie in order it is a copy, which has no values before :meth:`read`: they belong
    to the call's turn, as the call before it may write to the same tensor.
    """

    __slots__ = ("_filled", "_given", "result")

    def __init__(self, result: list[Any]) -> None:
        self.result = result
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor that the call reads."""
        return self._vector_of(tensor, self._given)

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor that the call writes to, and may read."""
        return self._vector_of(tensor, self._filled)

    def read(self) -> None:
        """Take what the tensors hold now, when it is the call's turn."""
        for vector, tensor in (*self._given, *self._filled):
            vector.copy_(tensor.reshape(-1))

    def write_back(self) -> None:
        """Put what copies hold into their tensors."""
        for vector, tensor in self._filled:
            tensor.copy_(vector.view(tensor.shape))

    def _vector_of(
        self, tensor: torch.Tensor, copies: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        tensor = _plain(tensor)
        if tensor.is_contiguous():
            return tensor.view(-1)
        vector = torch.empty(tensor.numel(), dtype=tensor.dtype)
        copies.append((vector, tensor))
        return vector


def as_vector(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements in order, or copy them where they do not lie in order."""
    return _plain(tensor).contiguous().view(-1)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    check_movable(tensor)
    if type(tensor) is not torch.Tensor and hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()  # a functional collective's wrapper around its result
    return tensor.detach() if tensor.requires_grad else tensor


def rows(vector: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
    """Cut a vector into equal parts."""
    if vector.numel() % num_rows:
        raise ValueError(
            f"the tensor for all ranks must have a multiple of {num_rows} elements, but has "
            f"{vector.numel():,}: one part for each rank."
        )
    return list(vector.view(num_rows, -1).unbind()) if vector.numel() else [vector] * num_rows


def parts(tensor: torch.Tensor, sizes: list[int] | None, num_ranks: int) -> list[torch.Tensor]:
    """Cut a contiguous tensor along its first dimension, evenly if `sizes` is empty."""
    if not sizes:
        return rows(tensor.view(-1), num_ranks)
    if len(sizes) != num_ranks or sum(sizes) != tensor.shape[0]:
        raise ValueError(
            f"split sizes must be {num_ranks} numbers with the sum {tensor.shape[0]}, the first "
            f"dimension, but are {list(sizes)}."
        )
    return [part.view(-1) for part in torch.split(tensor, sizes)]
