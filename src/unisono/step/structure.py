"""Checks that a model keeps its layers, parameters and buffers while a loop runs.

What a forward pass adds has no place in the arena and in snapshots, and the optimizer does not know
it. Once a step the identity of everything that modules hold is compared; names only where that has
changed, as layers without tensors may come and go.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn


class Structure:
    """What a model consists of when a loop begins. Final."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = _named(model)
        self._note()

    def begin(self) -> None:
        """Accept buffers that evaluation between two steps has made, for example masks."""
        if [*map(len, self._buffers)] != self._num_buffers:
            self._names = {**_named_buffers(self._model), **self._names}
            self._note()

    def check(self) -> None:
        """Refuse to go on with a model that has got or lost parameters or buffers.

        Raises:
            RuntimeError: it has; names the first.
        """
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
    """Name what has a place of its own: parameters by identity; buffers may be replaced."""
    return {name: id(p) for name, p in model.named_parameters()} | _named_buffers(model)


def _named_buffers(model: nn.Module) -> dict[str, int | None]:
    return {
        f"{prefix}.{name}".lstrip("."): None
        for prefix, module in model.named_modules()
        for name, _ in module._buffers.items()
    }


def _difference(before: dict[str, int | None], now: dict[str, int | None]) -> str:
    for name in now:
        if name not in before:
            return f"`{name}` has been added"
    for name in before:
        if name not in now:
            return f"`{name}` has been removed"
    name = next(name for name in now if now[name] != before[name])
    return f"`{name}` has been replaced"
