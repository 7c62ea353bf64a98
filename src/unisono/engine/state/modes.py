"""Switch a model's layers to `eval()` and back, even if `train` does more than set a flag.

Modules may override `train(mode)` to merge or unmerge weights, to fold branches or to clear caches;
so after calling an overridden `eval()`, the overridden `train()` must be called.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from torch import nn

_TRAINING = operator.attrgetter("training")


@final
class Modes:
    """The modes of a model's modules at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, list(model.modules())
        self._modes = list(map(_TRAINING, self._modules))

    def note(self) -> None:
        """Record the current modes as those to restore."""
        self._modes = list(map(_TRAINING, self._modules))

    def put_back(self) -> bool:
        """Restore the recorded modes; return whether any module had a different one."""
        if list(map(_TRAINING, self._modules)) == self._modes:
            return False
        if any(map(_has_own, self._modules)):
            _switch(self._model, mode=self._modes[0])
        for module, mode in zip(self._modules, self._modes, strict=True):
            if module.training != mode and _has_own(module):
                _switch(module, mode=mode)
            module.training = mode
        return True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[Modes]:
    """Switch a model to `eval()` within a block; yield its modes there."""
    before = Modes(model)
    _switch(model, mode=False)
    try:
        yield Modes(model)
    finally:
        before.put_back()


def _switch(model: nn.Module, *, mode: bool) -> None:
    try:
        model.train(mode) if mode else model.eval()
    except TypeError:  # a method that is called `train`, but trains
        for module in model.modules():
            module.training = mode


def _has_own(module: nn.Module) -> bool:
    kind = type(module)
    return kind.train is not nn.Module.train or kind.eval is not nn.Module.eval
