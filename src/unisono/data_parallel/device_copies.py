"""Keeps a copy of a module's tensors on each other device; only what has changed travels.

torch counts the changes of a tensor (``_version``), but not all of them: writes by way of
``.data``, and those of fused optimizers and of BatchNorm, are not counted. So a tensor that seems
unchanged is copied again if that is quick, and otherwise compared where it lies
(:mod:`unisono.data_parallel.same_bits`), for which the host waits. Once a change was found that
was not counted, tensors that take gradients are copied for every training pass, without comparing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from unisono.data_parallel.same_bits import Comparison, can_be_marked

SMALL_BYTES = 64 * 2**10
"""Tensors up to this size, such as BatchNorm's, are copied rather than compared."""
QUICK_BYTES = 16 * 2**20
"""So are all others, if they take no more than this together: an estimate, not measured on GPUs."""


@dataclass
class _Copy:
    """A tensor's copy, and how both were when it was made."""

    tensor: torch.Tensor
    source: tuple[int, int]
    version: int


class DeviceCopies:
    """The copies of one module's tensors on other devices. Final."""

    def __init__(self) -> None:
        self._held: dict[torch.device, list[_Copy]] = {}
        self._comparison = Comparison()
        self._all_are_counted = True

    def bring(
        self, tensors: Sequence[torch.Tensor], devices: Iterable[torch.device]
    ) -> dict[torch.device, list[torch.Tensor]]:
        """Bring the copies on other devices up to date.

        Args:
            tensors: on the first device; in the same order each time.
            devices: each other device, once.

        Returns:
            For each device its copies, to be read only.
        """
        is_training = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            for device in devices:
                self._bring_to(device, tensors, is_training=is_training)
        return {device: [copy.tensor for copy in self._held[device]] for device in devices}

    def _bring_to(
        self, device: torch.device, tensors: Sequence[torch.Tensor], *, is_training: bool
    ) -> None:
        held = self._held.setdefault(device, [])
        del held[len(tensors) :]
        unsure = []
        for position, tensor in enumerate(tensors):
            if position == len(held):
                held.append(_copied(tensor, device))
            elif not _fits(held[position].tensor, tensor):
                held[position] = _copied(tensor, device)
            elif _has_changed(held[position], tensor):
                _update(held[position], tensor)
            else:
                unsure.append(position)
        for position in self._uncounted(held, tensors, unsure, is_training=is_training):
            # Elsewhere than before: if nothing has changed, graphs may still need what is there.
            held[position] = _copied(tensors[position], device)

    def _uncounted(
        self,
        held: Sequence[_Copy],
        tensors: Sequence[torch.Tensor],
        unsure: Sequence[int],
        *,
        is_training: bool,
    ) -> list[int]:
        """Choose which copies to make again, of those of which no change was counted."""
        if sum(tensors[position].nbytes for position in unsure) <= QUICK_BYTES:
            return [*unsure]
        again, compared = [], []
        for position in unsure:
            tensor = tensors[position]
            is_trained = is_training and tensor.requires_grad
            if (
                tensor.nbytes <= SMALL_BYTES
                or not can_be_marked(tensor)
                or (is_trained and not self._all_are_counted)
            ):
                again.append(position)
            else:
                compared.append(position)
        differing = self._comparison.differing(
            [tensors[position] for position in compared],
            [held[position].tensor for position in compared],
        )
        changed = [
            position for position, differs in zip(compared, differing, strict=True) if differs
        ]
        self._all_are_counted = self._all_are_counted and not changed
        return again + changed


def _copied(tensor: torch.Tensor, device: torch.device) -> _Copy:
    made = tensor.detach().to(device, non_blocking=True, copy=True)
    return _Copy(made, _state(tensor), made._version)


def _update(copy: _Copy, tensor: torch.Tensor) -> None:
    copy.tensor.copy_(tensor, non_blocking=True)
    copy.source, copy.version = _state(tensor), copy.tensor._version


def _has_changed(copy: _Copy, tensor: torch.Tensor) -> bool:
    """Tell whether torch has counted a change of either."""
    return copy.source != _state(tensor) or copy.version != copy.tensor._version


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _fits(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        copy.dtype == tensor.dtype
        and copy.shape == tensor.shape
        and copy.layout == tensor.layout
        and (copy.layout != torch.strided or copy.stride() == tensor.stride())
    )
