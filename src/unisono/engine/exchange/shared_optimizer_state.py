"""Where the state of element-wise optimizers lies, whole and in pieces."""

from __future__ import annotations

import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer
from typing_extensions import override

from unisono.engine.exchange.arena import Arena, Region
from unisono.engine.state.optimizers import state_like
from unisono.plan.shards import Piece
from unisono.runtime.device import notices
from unisono.runtime.notices import say
from unisono.runtime.world import world


class StateKey(NamedTuple):
    """One tensor of a parameter's optimizer state."""

    at: int  # its position among all of them
    is_array: bool  # whether it has an element for each of the parameter's; else it is a scalar


StateKeys = list[dict[str, StateKey]]
"""For each parameter that is updated, the names of its state's tensors and where they lie."""


def plan_state(
    optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[StateKeys, dict[str, torch.Tensor]]:
    """Return the keys of every parameter's optimizer state, and an example tensor by name."""
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


def has_state(keys: Mapping[str, StateKey], state: Mapping[str, Any]) -> bool:
    """Return whether a parameter has state; raise ValueError if it does not fit the optimizer."""
    there = {name for name in keys if state.get(name) is not None}
    if there and there != keys.keys():
        raise ValueError(
            f"an optimizer's state must fit its options, but for these it keeps "
            f"{sorted(keys)} and has {sorted(there)}: clear `optimizer.state` "
            f"after such a change, or leave the options."
        )
    return bool(there)


def lay_down(
    state: Mapping[Any, Any], parameters: Sequence[torch.Tensor], keys: StateKeys, into: Region
) -> bytes:
    """Copy an optimizer's whole state into shared memory; return `known`."""
    flags = bytearray(len(parameters))
    for index, parameter in enumerate(parameters):
        there = state.get(parameter, {})
        if has_state(keys[index], there):
            flags[index] = 1
            for name, key in keys[index].items():
                _note_taken(there[name])
                into.put(key.at, there[name])
    return bytes(flags)


_taken = weakref.WeakValueDictionary[int, torch.Tensor]()
_LOADED_AGAIN = (
    "the optimizer's state is loaded again from tensors that it was loaded from before: here they "
    "still have those values, but torch's optimizers update the tensors that they are given, so a "
    "plain loop loads others now: load a copy each time, "
    "`optimizer.load_state_dict(copy.deepcopy(state))`"
)


def _note_taken(value: Any) -> None:
    """Report once that the program puts the same tensor into an optimizer's state again."""
    if not isinstance(value, torch.Tensor):
        return
    is_known = _taken.get(id(value)) is value
    _taken[id(value)] = value
    if is_known and "loaded again" not in notices() and world().rank == 0:
        notices().add("loaded again")
        say(_LOADED_AGAIN)


def place_of(states: Region, piece: Piece, key: StateKey) -> torch.Tensor:
    """View the state of a piece, as a vector; the scalars of a parameter have only one place."""
    if key.is_array:
        return states.piece(key.at, piece.start, piece.stop)
    return states.tensor(key.at)


class PiecesOfState(ABC):
    """Parameters and their optimizer state, in the pieces that workers update.

    Attributes:
        known: which parameters have optimizer state: a byte for each, 1 for those.
    """

    keys: StateKeys
    known: memoryview

    @abstractmethod
    def parameter(self, piece: Piece) -> torch.Tensor:
        """View a piece of a parameter, as a vector."""

    @abstractmethod
    def of_piece(self, piece: Piece) -> dict[str, Any]:
        """Return the state of a piece, vectors and scalars to be changed; it must have some."""

    @abstractmethod
    def adopt(self, piece: Piece, state: dict[str, Any]) -> None:
        """Keep state that the optimizer has just created for a piece."""

    @abstractmethod
    def show(self, optimizer: Optimizer, parameter: torch.Tensor, index: int) -> None:
        """Publish the new state of a parameter in the program's optimizer."""


@final
class SharedOptimizerState(PiecesOfState):
    """Parameters and their optimizer state in shared memory, whole and in pieces.

    Args:
        shown: the state as the program sees it.

    Attributes:
        changed: changes of `known` by the program, by position.
    """

    def __init__(self, arena: Arena, keys: StateKeys, shown: Region) -> None:
        self._arena, self.keys = arena, keys
        self.known = arena.whose
        self._shown = [{name: shown.tensor(key.at) for name, key in of.items()} for of in keys]
        self._seen: list[Any] = []
        self._has = [False] * len(keys)
        self.changed: dict[int, bool] = {}

    @override
    def parameter(self, piece: Piece) -> torch.Tensor:
        return self._arena.parameters.piece(piece.index, piece.start, piece.stop)

    @override
    def show(self, optimizer: Optimizer, parameter: torch.Tensor, index: int) -> None:
        if not self._has[index]:  # else the program may have changed it since
            self._has[index], self._seen = True, [None]  # to be looked at
            optimizer.state[parameter] = dict(self._shown[index])

    def forget(self) -> None:
        """Assume that the program has no state, because the run goes back."""
        self._has, self._seen = [False] * len(self.keys), [None]
        self.changed.clear()

    def take_replaced(
        self, state: MutableMapping[torch.Tensor, Any], parameters: Sequence[torch.Tensor]
    ) -> bool:
        """Store state that the program replaced, added or removed; return whether any was."""
        seen = [*chain.from_iterable(map(dict.values, state.values()))]
        if len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen)):
            return False
        is_new = False
        for index, parameter in enumerate(parameters):
            there = state.get(parameter, {})
            has = has_state(self.keys[index], there)
            if has != bool(self.known[index]) or self._has[index] > has:
                self.changed[index], is_new = has, True
            self._has[index] = has
            if has:
                for name, place in self._shown[index].items():
                    if there[name] is not place:
                        _note_taken(there[name])
                        place.copy_(torch.as_tensor(there[name]))
                        there[name], is_new = place, True
        self._seen = [*chain.from_iterable(map(dict.values, state.values()))]
        return is_new

    @override
    def of_piece(self, piece: Piece) -> dict[str, Any]:
        """Return the state of a piece.

        A shared scalar belongs to the worker of the first piece; the others keep copies, which
        count the same steps.
        """
        keys = self.keys[piece.index].items()
        places = {name: place_of(self._arena.states, piece, key) for name, key in keys}
        return {
            name: places[name] if key.is_array or piece.is_first else places[name].clone()
            for name, key in keys
        }

    @override
    def adopt(self, piece: Piece, state: dict[str, Any]) -> None:
        for name, key in self.keys[piece.index].items():
            if key.is_array or piece.is_first:
                place = place_of(self._arena.states, piece, key)
                place.copy_(state[name].reshape(place.shape))
                state[name] = place
        if piece.is_first:
            self.known[piece.index] = 1
