"""Checks that nothing but the optimizer changes the model within a step.

The checks run once per step or shard: passes do not change parameters, gradients come from the
shards' losses alone, and the model keeps its layers, parameters and buffers. A tensor that a
forward pass adds has no room in shared memory and in snapshots, and the optimizer does not know it.

``.grad`` holds *guards*, which refuse to be edited: clipping, masking or zeroing a gradient there
would change nothing, as what counts is the sum over all shards, which is complete when the step's
block ends. Guarding all gradients adds some percent to a small model's step. So all are guarded in
the first steps of a loop and in every 64th step; other steps guard one parameter in turn, which is
enough to detect code that edits all gradients.
"""

from __future__ import annotations

import operator
import os
import traceback
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.state.contents import updated_parameters

_VERSION, _GRADIENT = operator.attrgetter("_version"), operator.attrgetter("grad")
_FULL_AT_FIRST, _FULL_EVERY = 2, 64  # steps


@final
class ModelGuard:
    """Watches a model whose parameters an exchange has moved.

    `fixed` are the parameters that the optimizer does not update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        fixed: Sequence[nn.Parameter],
    ) -> None:
        self._optimizer = optimizer
        updated = updated_parameters(model, optimizer)
        self._names, self._parameters = list(updated), list(updated.values())
        self._guards = [GuardedGrad(name, p) for name, p in updated.items()]
        self._none: list[GuardedGrad | None] = [None] * len(updated)
        self._left: Sequence[GuardedGrad | None] = self._none  # what is to be found
        self._everywhere = range(len(updated))
        self._where = self._everywhere[:0]
        self._num_steps = self._turn = 0
        self._all = [*updated.values(), *fixed]
        self._structure = Structure(model)
        self._places = list(map(torch.Tensor.data_ptr, self._parameters))
        self._groups = self._ids_in_groups()
        self.remember()

    @property
    def looks_closely(self) -> bool:
        """Whether this step runs the expensive checks."""
        return self._is_full

    def begin(self, step: int) -> None:
        """Prepare for the passes of a step, which allocate every gradient."""
        self._structure.begin()
        self.clear_gradients()
        self._num_steps += 1
        self._is_full = self._num_steps <= _FULL_AT_FIRST or step % _FULL_EVERY == 0
        self._left, self._where = self._none, self._everywhere[:0]

    def clear_gradients(self) -> None:
        """Clear all gradients, so that the next backward pass allocates them."""
        for parameter in self._all:
            parameter.grad = None

    def guard_gradients(self) -> None:
        """Set guards as gradients, once the real ones are taken."""
        if self._where:
            return
        if self._is_full:
            self._left, self._where = self._guards, self._everywhere
        else:
            self._turn = (self._turn + 1) % len(self._guards)
            self._where = self._everywhere[self._turn : self._turn + 1]
            self._left = self._none.copy()
            self._left[self._turn] = self._guards[self._turn]
        for at in self._where:
            self._parameters[at].grad = self._guards[at]

    def release_gradients(self) -> None:
        """Remove the guards, so that a backward pass allocates each gradient."""
        if not self._where:
            return
        if self._is_full:
            self.check_gradients()
        for at in self._where:
            parameter = self._parameters[at]
            if parameter.grad is self._guards[at]:  # else the next check raises
                parameter.grad = None
        self._left, self._where = self._none, self._everywhere[:0]

    def remember(self) -> None:
        """Record the parameters' versions, which most changes in place increment."""
        self._versions = list(map(_VERSION, self._parameters))

    def check_passes(self) -> None:
        """Run the checks that are due after a worker's passes; raise RuntimeError."""
        self.check_untouched()
        self.check_gradients()
        self._structure.check()

    def check_gradients(self) -> None:
        """Raise RuntimeError for gradients of another loss, or that were set or removed.

        `optimizer.zero_grad()` may remove all of them, since many programs call it by habit.
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

    def check_groups(self) -> None:
        """Raise RuntimeError if the parameter groups of the optimizer have changed."""
        groups = self._ids_in_groups()
        if groups == self._groups:
            return
        number, before = len(groups), len(self._groups)
        what = "has others in them" if number == before else f"has {number} instead of {before}"
        raise RuntimeError(
            f"an optimizer must keep its parameter groups while a loop is under way, but {what}: "
            f"add groups, and change which parameters they have, between two loops."
        )

    def _ids_in_groups(self) -> list[list[int]]:
        return [[*map(id, group["params"])] for group in self._optimizer.param_groups]

    def check_untouched(self) -> None:
        """Raise RuntimeError if parameters were changed before the update."""
        versions = list(map(_VERSION, self._parameters))
        places = list(map(torch.Tensor.data_ptr, self._parameters))
        if versions == self._versions and places == self._places:
            return
        now, before = (
            zip(versions, places, strict=True),
            zip(self._versions, self._places, strict=True),
        )
        each = zip(self._names, now, before, strict=True)
        raise self.changed_in_a_pass(next(name for name, here, there in each if here != there))

    def changed_in_a_pass(self, name: str) -> RuntimeError:
        """Return the error for a step whose passes have changed a parameter."""
        remedy = (
            "change it between two steps, or keep what passes change in a buffer "
            "(`register_buffer`). If the first pass sets it from its samples, as ActNorm does, run "
            "the model once on one batch before the loop."
        )
        if not self._parameters[self._names.index(name)].requires_grad:
            remedy = "pass the optimizer only the parameters to train, as this one is frozen."
        return RuntimeError(
            f"forward and backward passes must leave the optimizer's parameters as they are, as "
            f"each worker computes only some of them, but `{name}` was changed: {remedy}"
        )


@final
class Structure:
    """The layers, parameters and buffers of a model when a loop begins.

    The identities of all submodules and parameters are compared first; names only if those have
    changed, since layers without tensors may be added and removed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = _named(model)
        self._note()

    def begin(self) -> None:
        """Accept buffers that evaluation between two steps has created, for example masks."""
        if [*map(len, self._buffers)] != self._num_buffers:
            self._names = {**_named_buffers(self._model), **self._names}
            self._note()

    def check(self) -> None:
        """Raise RuntimeError if the model has gained or lost parameters or buffers."""
        if self._ids() == self._noted and [*map(len, self._buffers)] == self._num_buffers:
            return
        now, before = _named(self._model), self._names
        if now != before:
            raise RuntimeError(
                f"a model must keep its layers, parameters and buffers while a loop is under way, "
                f"but {_difference(before, now)}: if a forward pass does that, run the model once "
                f"on one batch, then make the optimizer and train; else do it between two loops."
            )
        self._note()

    def _note(self) -> None:
        # TorchScript keeps what a module holds elsewhere, where it cannot change.
        modules = [m for m in self._model.modules() if isinstance(m._parameters, dict)]
        self._tables: list[dict[str, Any]] = [
            table for m in modules for table in (m._modules, m._parameters)
        ]
        self._buffers = [m._buffers for m in modules]
        self._kept = [*chain.from_iterable(map(dict.values, self._tables))]
        self._noted = self._ids()
        self._num_buffers = [*map(len, self._buffers)]

    def _ids(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict.values, self._tables)))]


def _named(model: nn.Module) -> dict[str, int | None]:
    """Map names to identities; buffers, which may be replaced, to None."""
    return {name: id(p) for name, p in model.named_parameters()} | _named_buffers(model)


def _named_buffers(model: nn.Module) -> dict[str, int | None]:
    return {
        f"{prefix}.{name}".lstrip("."): None
        for prefix, module in model.named_modules()
        for name, _ in module._buffers.items()
    }


def _difference(before: dict[str, int | None], now: dict[str, int | None]) -> str:
    for name in [*now, *before]:
        if name not in before or name not in now:
            return f"`{name}` has been {'added' if name in now else 'removed'}"
    return f"`{next(name for name in now if now[name] != before[name])}` has been replaced"


_ACCUMULATION = ("aten::add_", "aten::add")


@final
class GuardedGrad(torch.Tensor):
    """A placeholder for one parameter's gradient; has its shape, and no memory."""

    _name: str

    @staticmethod
    def __new__(cls, name: str, parameter: torch.Tensor) -> GuardedGrad:
        """Make a guard; `name` is the parameter's."""
        made: GuardedGrad = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made._name = name
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the guard, for debuggers and prints."""
        return f"<the gradient of `{self._name}`, left to the run until the step's block ends>"

    __str__ = __repr__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Raise RuntimeError for a function that a program calls."""
        is_property = func.__name__ in ("__get__", "__set__")
        used = func.__self__.__name__ if is_property else func.__name__
        raise refusal(_name_in([args, kwargs]), f"`{used}` was used on it")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Raise RuntimeError for calls by torch: another backward pass adds its gradient."""
        if func._schema.name in _ACCUMULATION:
            raise another_backward()
        raise refusal(_name_in([args, kwargs]), f"`{func}` was used on it")


# The remedy, by the file of torch that a program has called.
_REMEDIES = {
    f"{os.sep}torch{os.sep}optim{os.sep}": "leave `optimizer.step()` out, as the block's end does "
    "it",
    f"{os.sep}clip_grad.py": "pass `clip_norm=` or `clip_value=` to the run; `math.inf` computes "
    "the norm alone, `step.gradient_norm`",
}


def refusal(name: str, done: str) -> RuntimeError:
    """Return the error for a use of the gradient of the parameter `name`."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
    remedies = (do for of, do in _REMEDIES.items() if any(of in file for file in files))
    remedy = (
        "to mask or scale, pass `on_gradients=` to the run, or give the parameter a hook before "
        "the loop (`register_hook`); to clip, `clip_norm=` or `clip_value=`"
    )
    return RuntimeError(
        f"the gradient of `{name}` must be left to the run while a step is under way, since it is "
        f"one shard's part of a sum that is complete when the block ends, but {done}: "
        f"{next(remedies, remedy)}."
    )


def another_backward() -> RuntimeError:
    """Return the error for gradients of another backward pass."""
    return RuntimeError(
        "gradients must come from the loss that is returned, or given to `step.backward`, "
        "but another `backward` has left some: return the sum of all losses, or find "
        "other gradients with `torch.autograd.grad`, or call `optimizer.zero_grad()` after. "
        "What a program itself puts into `.grad` does not count either."
    )


def _name_in(arguments: Any) -> str:
    if isinstance(arguments, GuardedGrad):
        return arguments._name
    if isinstance(arguments, Mapping):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return ""
    return next(filter(None, map(_name_in, arguments)), "")
