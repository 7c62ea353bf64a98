"""What a program sees of ``optimizer.state`` where each worker keeps its pieces of it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.optim import Optimizer

from unisono.engine.state.optimizers import members_of


class Pieces(Protocol):
    """What a worker has of the state."""

    def present(self) -> Sequence[torch.Tensor]:
        """List the parameters that have state, here or elsewhere."""

    def here(self) -> Sequence[dict[str, Any]]:
        """Give all that this worker has."""


class StateInPieces(MutableMapping[Any, Any]):
    """Says which parameters have state, but not which, until it is whole again. Final.

    Args:
        optimizer: whose state it stands for.
        pieces: those of this worker.

    Attributes:
        bring: gives an optimizer its whole state; None: no worker can.
    """

    def __init__(self, optimizer: Optimizer, pieces: Pieces) -> None:
        self._optimizer, self.pieces = optimizer, pieces
        self.bring: Callable[[Optimizer], None] | None = None

    def __getitem__(self, key: Any) -> Any:
        return self._whole()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._whole()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._whole()[key]

    def __iter__(self) -> Iterator[Any]:
        if self.bring is not None:
            return iter(self._whole())
        own = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        return (one for one in self.pieces.present() if id(one) in own)

    def __len__(self) -> int:
        return len([*iter(self)])

    def __contains__(self, key: object) -> bool:
        return any(key is one for one in self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole().__reduce_ex__(protocol)

    def _whole(self) -> MutableMapping[Any, Any]:
        if self.bring is None:
            _refuse("the program reads or changes it")
        there: Any = self._optimizer.state
        if there is self:  # else it is whole already, and maybe changed since
            self.bring(self._optimizer)
        return self._optimizer.state


def _refuse(seen: str) -> NoReturn:
    raise RuntimeError(
        f"`optimizer.state` must be left alone while a loop is under way where each worker keeps "
        f"only its pieces of it, but {seen}: do so before or after the loop, or leave `zero` out "
        f"of UNISONO_EXCHANGE."
    )


def states_here(optimizer: Optimizer) -> list[Any]:
    """Give the state of each parameter, or what this worker has of it."""
    states = [member.state for member in members_of(optimizer).values()]
    return [
        one
        for state in states
        for one in (state.pieces.here() if isinstance(state, StateInPieces) else state.values())
    ]


def is_in_pieces(optimizer: Optimizer) -> bool:
    """Tell whether a loop is under way whose workers keep pieces of the state."""
    return any(
        isinstance(member.state, StateInPieces) and member.state.bring is None
        for member in members_of(optimizer).values()
    )


def check_in_place(optimizer: Optimizer, shown: Mapping[str, StateInPieces]) -> None:
    """Refuse, with a RuntimeError, state that the program has put in the place of what it sees."""
    for name, member in members_of(optimizer).items():
        if member.state is not shown[name]:
            _refuse("the program has put another in its place")
