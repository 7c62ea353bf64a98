"""Which stages of a model have the value of a tensor? Noted beside each tensor of a shard's pass.

A stage's worker runs the whole program. What its own stage computes are tensors as ever; what
another one computes is a *stand-in* here: a tensor on torch's ``meta`` device, which has a shape
and no memory. Both carry a note, and all workers' notes say the same.
"""

from __future__ import annotations

from typing import Any

import torch

_ATTRIBUTE = "_unisono_held"


class Held:
    """Where one tensor's value is. Final.

    Attributes:
        holders: the stages that have it, ascending; where it was changed, the one that did.
        value: what stands for the tensor on this worker where it is another object; None: itself.
        stand_in: the same on other stages' workers.
        is_parameter: whether it is a parameter, which all workers of a host can read.
        is_used: whether a stage has computed with it.
    """

    __slots__ = ("holders", "is_parameter", "is_used", "stand_in", "value")

    def __init__(self, stage: int, *, is_parameter: bool = False) -> None:
        self.holders: tuple[int, ...] = (stage,)
        self.value: torch.Tensor | None = None
        self.stand_in: torch.Tensor | None = None
        self.is_parameter = is_parameter
        self.is_used = False

    @property
    def newest(self) -> int:
        """The last stage that has the value."""
        return self.holders[-1]

    def source(self, stage: int) -> int | None:
        """Tell from which stage another one gets the value; None if it has it.

        The newest, so that gradients come back by way of it and are added up in the order in which
        one process adds them up.
        """
        return None if stage in self.holders else self.holders[-1]


def held(tensor: torch.Tensor) -> Held | None:
    """Give a tensor's note, if it has one."""
    found: Held | None = tensor.__dict__.get(_ATTRIBUTE)
    return found


def note(tensor: torch.Tensor, of: Held) -> None:
    """Put a note beside a tensor."""
    tensor.__dict__[_ATTRIBUTE] = of


def forget(tensor: torch.Tensor) -> None:
    """Take a tensor's note away."""
    tensor.__dict__.pop(_ATTRIBUTE, None)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """List the tensors in arguments, lists, tuples and dicts, in their order."""
    found: list[torch.Tensor] = []
    _collect(values, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _collect(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, found)


def with_tensors(value: Any, by: dict[int, Any]) -> Any:
    """Put other values in the place of tensors, which are given by their ids."""
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if isinstance(value, dict):
        return {key: with_tensors(one, by) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [with_tensors(one, by) for one in value]
        if isinstance(value, list):
            return parts
        # What torch returns with names is made of one sequence, and a named tuple of its fields.
        is_named = hasattr(value, "_fields")
        kind: Any = type(value)
        return kind(*parts) if is_named else kind(parts)
    return value
