"""Placeholders in ``.grad``, which refuse to be edited.

Clipping, masking or zeroing a gradient there would change nothing: what counts is the sum over all
shards, which is complete when the step's block ends. Each use is refused where it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_ACCUMULATION = ("aten::add_", "aten::add")


class Placeholder(torch.Tensor):
    """Stands for one parameter's gradient; has its shape, and no memory. Final."""

    _name: str

    @staticmethod
    def __new__(cls, name: str, parameter: torch.Tensor) -> Placeholder:
        """Make one; `name` is the parameter's."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made._name = name
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it is, for debuggers and prints."""
        return f"<the gradient of `{self._name}`, left to the run until the step's block ends>"

    __str__ = __repr__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what a program calls."""
        is_property = func.__name__ in ("__get__", "__set__")
        used = func.__self__.__name__ if is_property else func.__name__
        raise refusal(_name_in([args, kwargs]), f"`{used}` was used on it")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what torch calls by itself: another backward pass adds its gradient."""
        if func._schema.name in _ACCUMULATION:
            raise another_backward()
        raise refusal(_name_in([args, kwargs]), f"`{func}` was used on it")


def refusal(name: str, done: str) -> RuntimeError:
    """Make the error for a use of the gradient of the parameter `name`."""
    return RuntimeError(
        f"the gradient of `{name}` must be left to the run while a step is under way, since it is "
        f"one shard's part of a sum that is complete when the block ends, but {done}: to clip, "
        f"pass `clip_norm=` or `clip_value=` to the run; to mask or scale, give the parameter a "
        f"hook before the loop (`register_hook`); leave `optimizer.step()` to the run; read the "
        f"norm as `step.gradient_norm`, with `clip_norm=math.inf` where it should not be clipped."
    )


def another_backward() -> RuntimeError:
    """Make the error for gradients of another backward pass."""
    return RuntimeError(
        "gradients must come from the loss that is returned, or given to `step.backward`, "
        "but another `backward` has left some: return the sum of all losses, or find "
        "other gradients with `torch.autograd.grad`, or call `optimizer.zero_grad()` after. "
        "What a program itself puts into `.grad` does not count either."
    )


def _name_in(arguments: Any) -> str:
    """Find the first placeholder's name in the arguments of a call."""
    if isinstance(arguments, Placeholder):
        return arguments._name
    if isinstance(arguments, Mapping):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return ""
    return next(filter(None, map(_name_in, arguments)), "")
