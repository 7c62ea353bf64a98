"""Placeholders in ``.grad``, which refuse to be edited.

Clipping, masking or zeroing a gradient there would change nothing: what counts is the sum over all
shards, which is complete when the step's block ends. Each use is refused where it is made.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_GRADIENT = operator.attrgetter("grad")
_FULL_AT_FIRST, _FULL_EVERY = 2, 64  # steps
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


class Placeholders:
    """The placeholders of a run's parameters. Final.

    Setting all of them costs a small model's step some percent. So all are set in the first steps
    of a loop, and then in one step of 64; in the others one parameter in turn has its own, which is
    enough to notice code that edits all gradients.

    Args:
        parameters: those that the optimizer updates, by name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._all = [Placeholder(name, p) for name, p in parameters.items()]
        self._none: list[Placeholder | None] = [None] * len(self._all)
        self._left: Sequence[Placeholder | None] = self._none  # what is to be found
        self._everywhere = range(len(self._all))
        self._where = self._everywhere[:0]
        self._num_steps = self._turn = 0

    def begin(self, step: int) -> None:
        """Begin a step; no parameter has a gradient."""
        self._num_steps += 1
        self._is_full = self._num_steps <= _FULL_AT_FIRST or step % _FULL_EVERY == 0
        self._left, self._where = self._none, self._everywhere[:0]

    def set(self) -> None:
        """Put them where gradients have been taken."""
        if self._where:
            return
        if self._is_full:
            self._left, self._where = self._all, self._everywhere
        else:
            self._turn = (self._turn + 1) % len(self._all)
            self._where = self._everywhere[self._turn : self._turn + 1]
            self._left = self._none.copy()
            self._left[self._turn] = self._all[self._turn]
        for at in self._where:
            self._parameters[at].grad = self._all[at]

    def remove(self) -> None:
        """Take them away, so that a backward pass allocates each gradient.

        Raises:
            RuntimeError: the program has put something else there.
        """
        if not self._where:
            return
        if self._is_full:
            self.check()
        for at in self._where:
            parameter = self._parameters[at]
            if parameter.grad is self._all[at]:  # else the next check tells
                parameter.grad = None
        self._left, self._where = self._none, self._everywhere[:0]

    def check(self) -> None:
        """Refuse gradients that no shard's loss has led to, or that were put or taken away.

        `optimizer.zero_grad()` may take all away, as programs do from habit.

        Raises:
            RuntimeError: there is something else than was left there.
        """
        gradients = list(map(_GRADIENT, self._parameters))
        if all(map(operator.is_, gradients, self._left)):
            return
        if not any(gradient is not None for gradient in gradients):
            return
        for name, there, left in zip(self._names, gradients, self._left, strict=True):
            if there is not left:
                raise (
                    another_backward()
                    if left is None
                    else refusal(name, "it was taken away" if there is None else "it was replaced")
                )


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
