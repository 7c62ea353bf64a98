"""Where the state of element-wise optimizers lies, for workers that update pieces."""

from __future__ import annotations

from collections.abc import Mapping
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


StateKeys = list[dict[str, StateKey]]
"""For each parameter that is updated, the names of its state's tensors and where they lie."""


def plan_state(
    optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[StateKeys, dict[str, torch.Tensor]]:
    """List the optimizer state of every parameter, and an example of each tensor by its name."""
    keys: StateKeys = [{} for _ in parameters]
    examples: dict[str, torch.Tensor] = {}
    places = {id(p): (name, of) for (name, p), of in zip(parameters.items(), keys, strict=True)}
    for group in optimizer.param_groups:
        state_of = {
            dtype: state_like(optimizer, group, dtype)
            for dtype in {parameter.dtype for parameter in group["params"]}
        }
        for parameter in group["params"]:
            name, of_parameter = places[id(parameter)]
            for key, example in sorted(state_of[parameter.dtype].items()):
                is_array = example.numel() == 4
                of_parameter[key] = StateKey(len(examples), is_array)
                like = torch.empty_like(parameter, dtype=example.dtype, device="meta")
                examples[f"{key}/{name}"] = like if is_array else example.reshape(())
    return keys, examples


class Homes:
    """The shared values of parameters and their optimizer state, whole and in pieces. Final.

    Args:
        arena: where all of it lies.
        keys: of the optimizer's state.

    Attributes:
        known: which parameters have optimizer state: a byte for each, 1 for those.
    """

    def __init__(self, arena: Arena, keys: StateKeys) -> None:
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
