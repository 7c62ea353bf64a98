"""Several optimizers of one run, seen as one: all their groups, all their state.

What looks at a whole run (exchanges, checkpoints, digests) has one optimizer. What updates has each
by itself; see :func:`members_of`. A run with one optimizer is the case of one member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer


class SeveralOptimizers(Optimizer):
    """The optimizers of one run. Final.

    Args:
        members: by name; no two update the same parameter.
    """

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        self.members = dict(members)  # torch's own attributes are those of the members
        self._state = _States(self.members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, one optimizer after the other."""
        return [group for member in self.members.values() for group in member.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """The state of all by parameter; what belongs to none by ``NAME.KEY``."""
        return self._state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Each optimizer steps by itself."""
        raise RuntimeError("leave the steps of a run's optimizers to the run.")


class _States(MutableMapping[Any, Any]):
    """The state of several optimizers: each entry is in that of the one that it belongs to."""

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        self._members, self._owners = members, dict[torch.Tensor, Optimizer]()

    def __getitem__(self, key: Any) -> Any:
        state, own = self._at(key)
        if own not in state:  # torch's would make an entry
            raise KeyError(key)
        return state[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        state, own = self._at(key)
        state[own] = value

    def __delitem__(self, key: Any) -> None:
        state, own = self._at(key)
        del state[own]

    def __iter__(self) -> Iterator[Any]:
        for name, member in self._members.items():
            for key in member.state:
                yield key if isinstance(key, torch.Tensor) else f"{name}.{key}"

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members.values())

    def _at(self, key: Any) -> tuple[Any, Any]:
        """Find the state that has a key, and the key there."""
        if not isinstance(key, torch.Tensor):
            name, _, own = str(key).partition(".")
            return self._members[name].state, own
        if key not in self._owners:  # groups may be added between two loops
            self._owners = {
                parameter: member
                for member in self._members.values()
                for group in member.param_groups
                for parameter in group["params"]
            }
        return self._owners[key].state, key


def members_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Give each of a run's optimizers by its name; one alone has the name ""."""
    return optimizer.members if isinstance(optimizer, SeveralOptimizers) else {"": optimizer}


def kind_of(optimizer: Optimizer) -> str:
    """Name the class of an optimizer, or that of each of several."""
    return ", ".join(
        f"{name}: {type(member).__qualname__}" if name else type(member).__qualname__
        for name, member in members_of(optimizer).items()
    )
