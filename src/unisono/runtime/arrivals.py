"""Copies batches to an accelerator while it computes.

::

    the host     read, pin ─► issue ──────────────────► continue; it never waits
    copies                    copy ─► event ┐
    computing    … the shard before …       └► wait for the event ─► this shard

A copy waits for no computation, and a computation waits only for its own batch. Tensors are found
in tuples, lists, mappings and dataclasses, at any depth; a tensor that occurs twice is copied once.
Objects with a ``to`` method move themselves. Tested on a simulated device; not on a GPU yet.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from unisono.runtime.notices import say


@final
class Arrivals:
    """The batches copied to one accelerator."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module = device, module
        self._stream: Any = None

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Start to copy a batch; return a function that returns the copy, to be called once.

        Work that the device is given after that call runs after the copies.
        """
        found: dict[int, torch.Tensor] = {}

        def find(part: Any) -> Any:
            if self._is_plain(part):
                found[id(part)] = part
            return part if callable(getattr(part, "to", None)) else None

        changed_within(batch, find)
        if self._stream is None:
            self._stream = self._module.Stream(self._device)
        with self._module.stream(self._stream):
            copied = {key: self._copy(tensor) for key, tensor in found.items()}
        event = self._stream.record_event()

        def arrived(part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                there = copied.get(id(part))
                return self._copy(part) if there is None else there
            # such as torch's PackedSequence
            return part.to(self._device) if callable(getattr(part, "to", None)) else None

        def give() -> Any:
            stream = self._module.current_stream(self._device)
            stream.wait_event(event)
            for tensor in copied.values():
                # Otherwise its memory could be reused for the next batch too early.
                tensor.record_stream(stream)
            return changed_within(batch, arrived)

        return give

    def _is_plain(self, part: Any) -> bool:
        """Return whether a part is a tensor on the host whose copy waits for no computation."""
        return (
            type(part) is torch.Tensor
            and part.is_cpu
            and part.layout == torch.strided
            and not part.requires_grad
        )

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cpu and tensor.layout == torch.strided:
            tensor = pinned(tensor)
        return tensor.to(self._device, non_blocking=True)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a host tensor to pinned memory, which accelerators copy from and to without waiting.

    Returns the tensor itself, and reports it once, if the system has no such memory.
    """
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        report_not_pinned("batches and losses", str(error).partition("\n")[0])
        return tensor


@functools.cache
def report_not_pinned(what: str, reason: str) -> None:
    """Report, once per process, that copies are slower than necessary."""
    say(
        f"{what} are copied through memory that is not pinned, because the system refuses to pin "
        f"it ({reason}): results are the same, but copies take longer. Raise the limit of locked "
        f"memory (`ulimit -l`)."
    )


def changed_within(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a nested structure with changed parts; the same one if nothing changes.

    `change` returns the replacement for a part, or None to change the parts within it.
    """
    changed = change(nest)
    if changed is not None:
        return changed
    if isinstance(nest, Mapping):
        items = {key: changed_within(value, change) for key, value in nest.items()}
        if all(items[key] is value for key, value in nest.items()):
            return nest
        return like(nest, items)
    if isinstance(nest, (list, tuple)):
        parts = [changed_within(value, change) for value in nest]
        if all(map(operator.is_, parts, nest)):
            return nest
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = {field.name: getattr(nest, field.name) for field in dataclasses.fields(nest)}
        values = {name: changed_within(value, change) for name, value in fields.items()}
        if all(values[name] is value for name, value in fields.items()):
            return nest
        record = copy.copy(nest)
        for name, value in values.items():
            object.__setattr__(record, name, value)  # works for frozen dataclasses too
        return record
    return nest


def like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with these items, or a dict if that is impossible."""
    if type(mapping) is dict:
        return items
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
