"""What must stay as it is while a loop is under way: the model, its parameters, its optimizer.

Nobody but the optimizer writes to parameters, gradients come from the shards' losses alone, and the
model keeps its layers. Each is looked at once a step or once a shard, and refused in words.

To have a placeholder stand for each gradient costs a small model's step some percent. So all stand
in the first steps of a loop, and then in one step of 64; in others one parameter in turn has its
own, which is enough to notice what is done to all.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.state.contents import updated_parameters
from unisono.state.optimizers import is_surrounded
from unisono.step.placeholders import Placeholder, another_backward, refusal
from unisono.step.structure import Structure

_VERSION, _GRADIENT = operator.attrgetter("_version"), operator.attrgetter("grad")
_FULL_AT_FIRST, _FULL_EVERY = 2, 64  # steps


class BoundModel:
    """A model that an exchange has bound. Final.

    Args:
        model, optimizer: the user's.
        fixed: the parameters that the optimizer does not update.
        is_sliced: whether workers update pieces.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        fixed: Sequence[nn.Parameter],
        *,
        is_sliced: bool,
    ) -> None:
        self._optimizer, self._is_sliced = optimizer, is_sliced
        updated = updated_parameters(model, optimizer)
        self._names, self._parameters = list(updated), list(updated.values())
        self._placeholders = [Placeholder(name, p) for name, p in updated.items()]
        self._none: list[Placeholder | None] = [None] * len(updated)
        self._left: Sequence[Placeholder | None] = self._none  # what is to be found
        self._everywhere = range(len(updated))
        self._where = self._everywhere[:0]
        self._num_steps = self._turn = 0
        self._fixed = fixed
        self._all = [*updated.values(), *fixed]
        self._structure = Structure(model)
        self._places = list(map(torch.Tensor.data_ptr, self._all))
        self.remember()

    def begin(self) -> None:
        """Look at the model when a step begins, and have its passes allocate every gradient."""
        self.check_untouched()
        self._structure.begin()

    def clear_gradients(self) -> None:
        """Have the next backward pass allocate every gradient."""
        for parameter in self._all:
            parameter.grad = None

    def begin_passes(self, step: int) -> None:
        """Begin the passes of a step, with no gradients."""
        self.clear_gradients()
        self._num_steps += 1
        self._is_full = self._num_steps <= _FULL_AT_FIRST or step % _FULL_EVERY == 0
        self._left, self._where = self._none, self._everywhere[:0]

    def set_placeholders(self) -> None:
        """Let placeholders stand for the gradients that have been taken."""
        if self._where:
            return
        if self._is_full:
            self._left, self._where = self._placeholders, self._everywhere
        else:
            self._turn = (self._turn + 1) % len(self._placeholders)
            self._where = self._everywhere[self._turn : self._turn + 1]
            self._left = self._none.copy()
            self._left[self._turn] = self._placeholders[self._turn]
        for at in self._where:
            self._parameters[at].grad = self._placeholders[at]

    def remove_placeholders(self) -> None:
        """Leave no gradient where they stand, so that a backward pass makes its own.

        Raises:
            RuntimeError: the program has put something else there.
        """
        if not self._where:
            return
        if self._is_full:
            self.check_gradients()
        for at in self._where:
            parameter = self._parameters[at]
            if parameter.grad is self._placeholders[at]:  # else the next check tells
                parameter.grad = None
        self._left, self._where = self._none, self._everywhere[:0]

    def clear_fixed(self) -> None:
        """Forget the gradients of what the optimizer does not update."""
        for parameter in self._fixed:
            parameter.grad = None

    def remember(self) -> None:
        """Note the parameters' versions, which every change in place increments."""
        self._versions = list(map(_VERSION, self._all))
        self._num_groups = len(self._optimizer.param_groups)

    def check_passes(self) -> None:
        """Refuse what passes must not have done.

        Raises:
            RuntimeError: they have.
        """
        self.check_untouched()
        self.check_gradients()
        self._structure.check()

    def check_gradients(self) -> None:
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

    def check_untouched(self) -> None:
        """Refuse to go on after others than the optimizer have changed what all workers share."""
        if list(map(_VERSION, self._all)) != self._versions or (
            list(map(torch.Tensor.data_ptr, self._all)) != self._places
        ):
            raise RuntimeError(
                "parameters are shared by all workers while a loop over steps is under way and "
                "must be changed by the optimizer alone, but something else changed them in place "
                "or replaced their memory: do it between two loops."
            )
        if len(self._optimizer.param_groups) != self._num_groups:
            raise RuntimeError(
                f"an optimizer must keep its parameter groups while a loop is under way, but has "
                f"{len(self._optimizer.param_groups)} instead of {self._num_groups}: add groups "
                f"between two loops."
            )

    def check_update(self) -> None:
        """Refuse to update pieces with an optimizer that somebody has put code around meanwhile."""
        if self._is_sliced and is_surrounded(self._optimizer):
            raise RuntimeError(
                "hooks of an optimizer's `step`, and what is put around it, must be there before "
                "a loop begins, but came under way: register or wrap before, or between two loops."
            )
