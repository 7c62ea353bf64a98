"""Brings batches to an accelerator beside what that computes.

::

    the host     read, pin ─► issue ──────────────────► go on; it never waits
    copies                    copy ─► event ┐
    computing    … the shard before …       └► wait for the event ─► this shard

So a copy waits for nothing that is computed, and what is computed waits for its own batch alone.
Tensors are found in tuples, lists, mappings and dataclasses, however deep; one that is there twice
is copied once. Whatever has a method ``to`` moves itself. Run on a simulated device; not on a GPU
yet.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from unisono.notices import say


class Arrivals:
    """The batches that come to one accelerator. Final."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module = device, module
        self._stream: Any = None

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Begin to copy a batch.

        Returns:
            Gives the batch, once: what the device is given to do from then on comes after the
            copies. Until it is called, nobody has to wait for them.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """
        found = {id(tensor): tensor for tensor in _tensors_in(batch) if self._is_plain(tensor)}
        if self._stream is None:
            self._stream = self._module.Stream(self._device)
        with self._module.stream(self._stream):
            copied = {key: self._copy(tensor) for key, tensor in found.items()}
        event = self._stream.record_event()

        def arrived(tensor: torch.Tensor) -> torch.Tensor:
            there = copied.get(id(tensor))
            return self._copy(tensor) if there is None else there

        def give() -> Any:
            stream = self._module.current_stream(self._device)
            stream.wait_event(event)
            for tensor in copied.values():
                # Else its memory is given to the next batch while this one is computed.
                tensor.record_stream(stream)
            return _moved(batch, self._device, arrived)

        return give

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies on the host, so that nothing computed has to be waited for."""
        return (
            type(tensor) is torch.Tensor
            and tensor.is_cpu
            and tensor.layout == torch.strided
            and not tensor.requires_grad
        )

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cpu and tensor.layout == torch.strided:
            tensor = pinned(tensor)
        return tensor.to(self._device, non_blocking=True)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of the host to memory that accelerators copy from and to without waiting.

    Where the system has no such memory to give, that is told once, and the tensor stays as it is.
    """
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        tell_not_pinned("batches and losses", str(error).partition("\n")[0])
        return tensor


@functools.cache
def tell_not_pinned(what: str, reason: str) -> None:
    """Say, once in this process, that copies take longer than they should."""
    say(
        f"{what} are copied by way of memory that is not pinned, as the system refuses to pin it "
        f"({reason}): results are the same, copies take longer. Raise the limit of locked memory "
        f"(`ulimit -l`)."
    )


def _tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif callable(getattr(batch, "to", None)):
        return
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors_in(value)
    elif _is_record(batch):
        for field in dataclasses.fields(batch):
            yield from _tensors_in(getattr(batch, field.name))


def _moved(batch: Any, to: torch.device, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Make a batch of the same kind with every tensor moved."""
    if isinstance(batch, torch.Tensor):
        return move(batch)
    if callable(getattr(batch, "to", None)):  # torch's PackedSequence, say
        return batch.to(to)
    if isinstance(batch, Mapping):
        moved = {key: _moved(value, to, move) for key, value in batch.items()}
        return moved if type(batch) is dict else _like(batch, moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, to, move) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(value, to, move) for value in batch)
    if _is_record(batch):
        moved_batch = copy.copy(batch)
        for field in dataclasses.fields(batch):  # also of frozen ones
            object.__setattr__(
                moved_batch, field.name, _moved(getattr(batch, field.name), to, move)
            )
        return moved_batch
    return batch


def _is_record(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _like(batch: Any, moved: dict[Any, Any]) -> Any:
    """Put moved values into a mapping of the batch's own kind, where that can be made."""
    try:
        return type(batch)(moved)
    except TypeError:
        return moved
