"""Where do values that are not finite come from? A failing shard's forward pass, computed again.

Hooks on each module check whether its input and its output are finite. Passes that succeed have no
hooks.
"""

from __future__ import annotations

import enum
import linecache
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.runtime.notices import shown

_NOT_THE_PROGRAM = (
    f"{os.path.dirname(torch.__file__)}{os.sep}",
    f"{Path(__file__).resolve().parents[1]}{os.sep}",
    "<",
)


class CallSite(NamedTuple):
    """Where an operation is called: the module's name and class, and a line of the program."""

    module: str | None = None
    kind: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        """Describe the place in words."""
        if self == CallSite():
            return "a shard"
        where = "a function outside of the model" if self.module is None else "the model"
        if self.module:
            where = f"`{self.module}` of the model"
        if self.kind:
            where += f" ({self.kind})"
        if self.file:
            code = shown(linecache.getline(self.file, self.line).strip())
            with suppress(OSError):  # the working directory was removed
                where += f", {self.file.removeprefix(os.getcwd() + os.sep)}, line {self.line}"
            where += f", `{code}`" if code else ""
        return where


class Finiteness(enum.IntEnum):
    """Whether all values of some tensors are finite."""

    FINITE = 0
    MASK = 1  # only −inf, as in attention masks
    BAD = 2


class BadOutput(NamedTuple):
    """A module's output that is not finite: where it is called, its output, and its input."""

    place: CallSite
    values: Finiteness
    given: Finiteness


@final
class FinitenessHooks:
    """Hooks on a model's modules, until it is closed.

    `output` is the first that is not finite. One with −inf among finite values may be a mask: it is
    dropped once a module whose input has such values has a finite output.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        self._inside: list[tuple[str, Finiteness]] = []
        self.output: BadOutput | None = None
        self._stack = ExitStack()
        if "torch._dynamo" in sys.modules:  # compiled code calls no hooks
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in model.named_modules():
            with suppress(Exception):  # such as a module of TorchScript
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                begun = module.register_forward_pre_hook(enter, with_kwargs=True)
                self._stack.callback(begun.remove)
                ended = module.register_forward_hook(leave, always_call=True)
                self._stack.callback(ended.remove)

    def close(self) -> None:
        """Remove the hooks."""
        self._stack.close()

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append((name, values_of((args, kwargs))))

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        given, values = self._inside.pop()[1], values_of(output)
        if values != Finiteness.FINITE and self.output is None:
            lines = [(frame.f_code.co_filename, line) for frame, line in walk_stack(None)]
            place = innermost(lines[::-1])._replace(module=name, kind=self._kinds[name])
            self.output = BadOutput(place, values, given)
        elif (values, given) == (Finiteness.FINITE, Finiteness.MASK) and self.output is not None:
            self.output = self.output if self.output.values == Finiteness.BAD else None


@torch.no_grad()
def values_of(value: Any) -> Finiteness:
    """Return whether all floating-point tensors in a value are finite."""
    worst = Finiteness.FINITE
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            with suppress(Exception):  # a kind of tensor without these operations
                rest = leaf[~torch.isfinite(leaf)]
                is_mask = bool((rest == -math.inf).all())
                kind = Finiteness.MASK if is_mask else Finiteness.BAD
                worst = max(worst, kind if rest.numel() else Finiteness.FINITE)
    return worst


def innermost(lines: Sequence[tuple[str, int]]) -> CallSite:
    """Return the innermost line that belongs to the program."""
    own = [line for line in lines if not line[0].startswith(_NOT_THE_PROGRAM)]
    return CallSite(file=own[-1][0], line=own[-1][1]) if own else CallSite()
