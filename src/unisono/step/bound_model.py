"""What must stay as it is while a loop is under way: the model, its parameters, its optimizer.

Nobody but the optimizer writes to parameters, gradients come from the shards' losses alone, and the
model keeps its layers. Each is looked at once a step or once a shard, and refused in words.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.state.contents import updated_parameters
from unisono.state.optimizers import is_surrounded
from unisono.step.placeholders import Placeholders
from unisono.step.structure import Structure

_VERSION = operator.attrgetter("_version")


class BoundModel:
    """A model that an exchange has bound. Final.

    Args:
        model, optimizer: the user's.
        fixed: the parameters that the optimizer does not update.
        is_sliced: whether workers update pieces.

    Attributes:
        placeholders: what stands for gradients that have been taken.
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
        self.placeholders = Placeholders(updated)
        self._fixed = fixed
        self._all = [*updated.values(), *fixed]
        self._structure = Structure(model)
        self._places = list(map(torch.Tensor.data_ptr, self._all))
        self.remember()

    def begin(self, step: int) -> None:
        """Look at the model when a step begins, and have its passes allocate every gradient."""
        self.check_untouched()
        self._structure.begin()
        self.clear_gradients()
        self.placeholders.begin(step)

    def clear_gradients(self) -> None:
        """Have the next backward pass allocate every gradient."""
        for parameter in self._all:
            parameter.grad = None

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
        self.placeholders.check()
        self._structure.check()

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
