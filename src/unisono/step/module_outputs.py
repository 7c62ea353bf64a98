"""Which module's output is the first that is not finite? Looked at by hooks in a forward pass."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.step.graph_notes import CallSite, innermost


class Finiteness(enum.IntEnum):
    """Whether all values of some tensors are finite."""

    FINITE = 0
    MASK = 1  # −inf alone, as in attention masks
    BAD = 2


def values_of(value: Any) -> Finiteness:
    """Look at all floating-point tensors in something."""
    worst = Finiteness.FINITE
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            worst = max(worst, _values_of_tensor(leaf))
    return worst


@torch.no_grad()
def _values_of_tensor(tensor: torch.Tensor) -> Finiteness:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return Finiteness.FINITE
    try:
        is_finite = torch.isfinite(tensor.detach())
        if bool(is_finite.all()):
            return Finiteness.FINITE
        rest = tensor.detach()[~is_finite]
        is_mask = not rest.is_complex() and bool((rest == -math.inf).all())
    except Exception:  # a kind of tensor that cannot be asked
        return Finiteness.FINITE
    return Finiteness.MASK if is_mask else Finiteness.BAD


class BadOutput(NamedTuple):
    """A module's output that is not finite."""

    place: CallSite
    values: Finiteness
    input: Finiteness


class ModuleOutputs:
    """Which module's output was the first that is not finite? Final.

    One that holds −inf beside finite values may be a mask. It counts no more once a module that is
    given such values has finite output.
    """

    def __init__(self) -> None:
        self._inputs: list[Finiteness] = []
        self.first: BadOutput | None = None

    def enter(self, given: Any) -> None:
        """Look at what a module is given."""
        self._inputs.append(values_of(given))

    def leave(self, module: nn.Module, name: str, output: Any) -> None:
        """Look at what it returns."""
        given, values = self._inputs.pop(), values_of(output)
        if self.first is None and values != Finiteness.FINITE:
            place = _caller()._replace(module=name, kind=type(module).__name__)
            self.first = BadOutput(place, values, given)
        elif (
            values == Finiteness.FINITE
            and given == Finiteness.MASK
            and self.first is not None
            and self.first.values == Finiteness.MASK
        ):
            self.first = None


@contextmanager
def outputs_watched(model: nn.Module) -> Iterator[ModuleOutputs]:
    """Look at the output of every module within a block."""
    seen = ModuleOutputs()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # compiled code calls no hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            with suppress(Exception):  # as a module of TorchScript
                begun = module.register_forward_pre_hook(
                    lambda _, args, kwargs: seen.enter((args, kwargs)), with_kwargs=True
                )
                stack.callback(begun.remove)
                ended = module.register_forward_hook(
                    lambda module, _, output, name=name: seen.leave(module, name, output),
                    always_call=True,
                )
                stack.callback(ended.remove)
        yield seen


def _caller() -> CallSite:
    """Find the program's line that has called the module whose hook is running."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_stack(None)]
    return innermost(frames[::-1])
