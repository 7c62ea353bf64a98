"""What modules keep beside their tensors and call their state: torch's ``get_extra_state``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class ExtraState:
    """The extra state of a model's modules, by their names, kept as an object with a state. Final.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def is_empty(self) -> bool:
        """Whether no module has any."""
        return not self._modules()

    def state_dict(self) -> dict[str, Any]:
        """Ask each module for its extra state."""
        return {name: module.get_extra_state() for name, module in self._modules().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each module what it has said; those that were not asked then stay as they are."""
        for name, module in self._modules().items():
            if name in state:
                module.set_extra_state(state[name])

    def _modules(self) -> dict[str, nn.Module]:
        return {
            name: module
            for name, module in self._model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
