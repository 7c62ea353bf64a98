"""Where the optimizer's state of element-wise optimizers lies, for workers that update pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from unisono.exchange.arena import Arena
from unisono.plan.slices import Piece
from unisono.state.optimizers import state_like


@dataclass(frozen=True, slots=True)
class StateKey:
    """One tensor of a parameter's optimizer state.

    Attributes:
        at: its position among all of them.
        is_array: whether it has an element for each of the parameter's; else it is a scalar.
    """

    at: int
    is_array: bool


def plan_state(
    optimizer: Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> tuple[list[dict[str, StateKey]], list[torch.Tensor]]:
    """List the optimizer state of every parameter, and an example of each tensor."""
    keys: list[dict[str, StateKey]] = [{} for _ in parameters]
    examples: list[torch.Tensor] = []
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    for group in optimizer.param_groups:
        state_of = {
            dtype: state_like(optimizer, group, dtype)
            for dtype in {parameter.dtype for parameter in group["params"]}
        }
        for parameter in group["params"]:
            for name, example in sorted(state_of[parameter.dtype].items()):
                is_array = example.numel() == 4
                keys[index_of[id(parameter)]][name] = StateKey(len(examples), is_array)
                like = torch.empty_like(parameter, dtype=example.dtype, device="meta")
                examples.append(like if is_array else example.reshape(()))
    return keys, examples


class Homes:
    """The shared values of parameters and their optimizer state, whole and in pieces. Final.

    Args:
        arena: where all of it lies.
        keys: for each parameter, its state's names and where they lie.

    Attributes:
        known: which parameters have optimizer state: a byte for each, 1 for those.
    """

    def __init__(self, arena: Arena, keys: Sequence[dict[str, StateKey]]) -> None:
        self._arena, self.keys = arena, keys
        self.known = arena.whose

    def parameter(self, piece: Piece) -> torch.Tensor:
        """View a piece of a parameter, as a vector."""
        return self._arena.parameters.piece(piece.index, piece.start, piece.stop)

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """View one parameter's whole state, by name."""
        return {name: self._arena.states.tensor(key.at) for name, key in self.keys[index].items()}

    def of_piece(self, piece: Piece, key: StateKey) -> torch.Tensor:
        """View the state of a piece, as a vector; a scalar is the whole parameter's."""
        if key.is_array:
            return self._arena.states.piece(key.at, piece.start, piece.stop)
        return self._arena.states.tensor(key.at)
