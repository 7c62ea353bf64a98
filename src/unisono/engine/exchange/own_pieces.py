"""One worker's pieces of the optimizer's state, which nobody else has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unisono.engine.exchange.arena import Arena, Region
from unisono.engine.exchange.shared_optimizer_state import PiecesOfState, StateKeys, place_of
from unisono.engine.state.optimizer_state import move_one
from unisono.plan.shards import Piece
from unisono.runtime.device import in_memory_order


class OwnPieces(PiecesOfState):
    """This worker's pieces of the optimizer's state, where its parameters are. Final.

    Args:
        arena: says which parameters have state.
        keys: of the state.
        parameters: with the options of the group of each.
    """

    def __init__(
        self,
        arena: Arena,
        keys: StateKeys,
        parameters: Sequence[tuple[nn.Parameter, Mapping[str, Any]]],
    ) -> None:
        self.keys, self.known = keys, arena.whose
        self._parameters = parameters
        self._held: dict[Piece, dict[str, Any]] = {}

    def parameter(self, piece: Piece) -> torch.Tensor:
        """See :class:`PiecesOfState`."""
        return in_memory_order(self._parameters[piece.index][0])[piece.start : piece.stop]

    def of_piece(self, piece: Piece) -> dict[str, Any]:
        """See :class:`PiecesOfState`."""
        return self._held[piece]

    def adopt(self, piece: Piece, state: dict[str, Any]) -> None:
        """See :class:`PiecesOfState`; it stays where it is."""
        self._held[piece] = state
        if piece.is_first:
            self.known[piece.index] = 1

    def show(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, index: int) -> None:
        """See :class:`PiecesOfState`; no worker can."""

    def here(self) -> list[dict[str, Any]]:
        """Give all that this worker has."""
        return [*self._held.values()]

    def present(self) -> list[nn.Parameter]:
        """List the parameters that have state."""
        each = zip(self._parameters, self.known, strict=True)
        return [parameter for (parameter, _), has in each if has]

    def forget(self) -> None:
        """Have nothing."""
        self._held.clear()

    def hold(self, pieces: Sequence[Piece], kept: Region) -> None:
        """Have the state of these pieces alone; take what is not here from where all of it is."""
        self._held = {
            piece: self._held.get(piece) or self._taken(piece, kept)
            for piece in pieces
            if self.known[piece.index]
        }

    def _taken(self, piece: Piece, kept: Region) -> dict[str, Any]:
        parameter, group = self._parameters[piece.index]
        keys = self.keys[piece.index].items()
        state: dict[str, Any] = {name: place_of(kept, piece, key).clone() for name, key in keys}
        move_one(state, group, parameter.device)
        return state

    def leave(self, known: memoryview) -> None:
        """Have nothing, as a loop has ended in which these parameters have got state."""
        for state in self._held.values():
            state.clear()  # whoever updates has it, too
        self._held.clear()
        self.known = memoryview(bytes(known))

    def make_whole(self, optimizer: torch.optim.Optimizer, kept: Region) -> None:
        """Give an optimizer the whole state of its parameters, from where all of it is."""
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for index, (parameter, group) in enumerate(self._parameters):
            if self.known[index] and id(parameter) in own:
                keys = self.keys[index].items()
                state[parameter] = {name: kept.tensor(key.at).clone() for name, key in keys}
                move_one(state[parameter], group, parameter.device)
        optimizer.state = state

    def write(self, into: Region) -> None:
        """Copy all that this worker has to where all of it is."""
        for piece, state in self._held.items():
            for name, key in self.keys[piece.index].items():
                if key.is_array or piece.is_first:
                    place = place_of(into, piece, key)
                    place.copy_(state[name].detach().reshape(place.shape))
