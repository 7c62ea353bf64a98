"""An optimizer's state by name: tensors, plain values, and the options of its groups.

State that belongs to no parameter (a count of all steps, say) goes under the name "".

If each worker keeps only its pieces, ``optimizer.state`` lists which parameters have state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.state.optimizers import is_surrounded, optimizers_of
from unisono.engine.state.packing import (
    STATE_PREFIX,
    check_plain,
    keep_in,
    pack,
    pack_number,
    unpack,
)
from unisono.errors import CheckpointError
from unisono.programs.holders import HOOKS_OF_OPTIMIZERS
from unisono.programs.kept import OPTIMIZER
from unisono.runtime.arrivals import changed_within
from unisono.runtime.device import is_on_host
from unisono.runtime.notices import shown

_MISSING = object()
_PLAIN = (bool, int, float, str, tuple)
_NONE = ""  # the name of no parameter
NO_OPTIONS = {"params", "param_names"}  # of a group


def named_states(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Mapping[Any, Any]]:
    """Return an optimizer's state by parameter name, and its other state under ""."""
    return {
        **{name: optimizer.state.get(parameter, {}) for name, parameter in named.items()},
        _NONE: {key: optimizer.state[key] for key in _own_keys(optimizer)},
    }


def take_state(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Take an optimizer's state apart; raise CheckpointError for what cannot be saved.

    Return its tensors as ``KEY/PARAMETER``, or ``KEY/PLACE/PARAMETER`` within lists and dicts; and
    the rest by parameter and key, as plain JSON that refers to the tensors.
    """
    states = named_states(optimizer, named)
    tensors = {
        f"{key}/{name}": value
        for name, state in states.items()
        for key, value in state.items()
        if _is_direct(key, value)
    }
    rest = {name: _take_rest(name, state, tensors) for name, state in states.items()}
    if pair := overlapping({**named, **tensors}):
        raise CheckpointError(
            f"tensors of an optimizer's state must not share memory to be kept with a run, since "
            f"each is restored separately, but `{pair[0]}` and `{pair[1]}` do: keep a `.clone()`, "
            f"or keep one and compute the other from it."
        )
    return tensors, {name: packed for name, packed in rest.items() if packed}


def overlapping(named: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors that share memory; None if there are none."""
    places = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor), name)
        for name, tensor in named.items()
        if tensor.numel() and tensor.layout == torch.strided
    )
    pairs = itertools.pairwise(places)
    return next(((one[2], other[2]) for one, other in pairs if other[0] < one[1]), None)


def _extent_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def join_state(
    tensors: Mapping[str, torch.Tensor],
    rest: Mapping[str, Mapping[str, Any]],
    named: Collection[str],
    *,
    copies: bool = True,
) -> dict[str, dict[str, Any]]:
    """Reassemble, by parameter and key, what :func:`take_state` took apart.

    Tensors of the program are left out. Raises CheckpointError if the form or the parameters
    differ.
    """
    own = {label: one for label, one in tensors.items() if not label.startswith(STATE_PREFIX)}
    direct = dict(own)

    def take(label: str) -> torch.Tensor:
        direct.pop(label, None)
        return own[label].clone() if copies else own[label]

    states = {name: unpack(state, take, "the optimizer's state") for name, state in rest.items()}
    for label, tensor in direct.items():
        key, slash, name = label.partition("/")
        if not slash:
            raise CheckpointError(
                f"the optimizer's tensors must be named KEY/PARAMETER, but one is "
                f"`{shown(label, 80)}`."
            )
        # A copy lies where torch would put it; products may depend on that.
        states.setdefault(name, {})[key] = tensor.clone() if copies else tensor
    for name in sorted(states):
        if name and name not in named:
            raise CheckpointError(
                f"the optimizer must update `{shown(name)}` as in the checkpoint, but does not: "
                f"create it with the same parameters, or give each run its own `directory`."
            )
    return states


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups as plain JSON, or raise CheckpointError."""
    return [
        {
            key: _plain(f"the optimizer's `{key}`", value)
            for key, value in group.items()
            if key not in NO_OPTIONS
        }
        for group in optimizer.param_groups
    ]


def put_back_state(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter], states: Mapping[str, dict[str, Any]]
) -> None:
    """Set an optimizer's state to the result of :func:`join_state`."""
    for key in _own_keys(optimizer):
        del optimizer.state[key]
    optimizer.state.update(states.get(_NONE, {}))  # type: ignore[arg-type]
    for name, parameter in named.items():
        optimizer.state.pop(parameter, None)
        if name in states:
            optimizer.state[parameter] = states[name]
    move_state(optimizer)


def move_state(optimizer: Optimizer) -> None:
    """Move state to the devices of its parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state is not None and not is_on_host(parameter):
                move_one(state, group, parameter.device)


def move_one(state: dict[str, Any], group: Mapping[str, Any], device: torch.device) -> None:
    """Move the state of one parameter of a group to a device.

    As in torch's ``load_state_dict``, the step count stays on the host unless the optimizer uses it
    on the device (``fused``, ``capturable``).
    """
    counts_there = bool(group.get("fused") or group.get("capturable"))
    for key, value in state.items():
        if key != "step" or counts_there:
            state[key] = changed_within(
                value, lambda part: part.to(device) if isinstance(part, torch.Tensor) else None
            )


def apply_state(
    optimizer: Optimizer,
    named: Mapping[str, nn.Parameter],
    facts: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Set an optimizer's state from the saved facts and tensors of a run."""
    put_back_state(optimizer, named, join_state(tensors, facts["numbers"], named))


def check_keys(optimizer: Optimizer, kept: Iterable[Any] = ()) -> None:
    """Raise CheckpointError if an optimizer keeps more than its `state` and its groups' options.

    It may lead to optimizers that are `kept` with the run.
    """
    saved = {*map(id, kept)}
    for single in optimizers_of(optimizer).values():
        troubles = [
            f"`{key}` is another optimizer with separate state"
            for key, value in vars(single).items()
            if isinstance(value, Optimizer)
            and value.state is not single.state
            and id(value) not in saved
        ]
        if type(single).state_dict is not Optimizer.state_dict:
            beside = _beside("", single.state_dict(), Optimizer.state_dict(single))
            troubles[:0] = [f"`state_dict` also has `{path}`" for path in beside]
        if troubles:
            raise CheckpointError(
                f"an optimizer must have all its state in `optimizer.state` to be kept with a run, "
                f"but {type(single).__name__}'s {troubles[0]}: save that in `run.state`, use an "
                f"optimizer that has, or train without checkpoints."
            )


def _plain(what: str, value: Any) -> Any:
    """Convert a value to plain JSON, or raise CheckpointError; `what` is its name."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(what, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(what, item) for item in value]
    if callable(value):
        raise CheckpointError(
            f"{what} must be a tensor, a number or a text to be kept, but is a function: keep that "
            f"in an attribute of the optimizer instead of `param_groups`."
        )
    # `np.float64` is a float of Python.
    return check_plain(what, value) if isinstance(value, float) else pack_number(what, value)


def _own_keys(optimizer: Optimizer) -> list[Any]:
    return [key for key in optimizer.state if not isinstance(key, torch.Tensor)]


def _beside(path: str, said: Any, known: Any) -> Iterator[str]:
    """Yield the paths at which a state dict differs from torch's."""
    if isinstance(said, Mapping) and isinstance(known, Mapping):
        for key, value in said.items():
            yield from _beside(f"{path}/{key}".lstrip("/"), value, known.get(key, _MISSING))
    elif isinstance(said, list) and isinstance(known, list) and len(said) == len(known):
        for at, (value, there) in enumerate(zip(said, known, strict=True)):
            yield from _beside(f"{path}/{at}", value, there)
    elif isinstance(said, torch.Tensor) and isinstance(known, torch.Tensor):
        if said.dtype != known.dtype or not torch.equal(said, known):
            yield path
    elif said is not known and not (isinstance(said, _PLAIN) and said == known):
        yield path


def _take_rest(
    name: str, state: Mapping[Any, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    for key in state:
        if not isinstance(key, str):
            raise CheckpointError(
                f"an optimizer must name its state by texts to have it kept, but has {key!r:.80}."
            )
    keep = keep_in(tensors, lambda path: f"{path}/{name}")
    return {
        key: pack(value, key, keep, _told)
        for key, value in state.items()
        if not _is_direct(key, value)
    }


def _is_direct(key: Any, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and "/" not in str(key)


def _told(path: str) -> str:
    return f"the optimizer's `{path}`"


class StateInPieces(MutableMapping[Any, Any]):
    """Lists which parameters have state; the values are available once it is whole again.

    `pieces` are this worker's :class:`OwnPieces`. `bring` makes an optimizer's state whole; None
    during the loop.
    """

    def __init__(self, optimizer: Optimizer, pieces: Any) -> None:
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
    """Return the state of each parameter, as far as this worker has it."""
    states = [single.state for single in optimizers_of(optimizer).values()]
    return [
        one
        for state in states
        for one in (state.pieces.here() if isinstance(state, StateInPieces) else state.values())
    ]


def tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of the optimizer's state that this process has."""
    for state in states_here(optimizer):
        if isinstance(state, dict):
            yield from (one for one in state.values() if isinstance(one, torch.Tensor))


def optimizers_as_objects(optimizer: Optimizer, *, of_torch: bool) -> dict[str, Any]:
    """Return the run's optimizers by path: those of torch, or all others.

    One whose steps the program's hooks surround is not torch's alone.
    """
    path = "optimizer" if of_torch else OPTIMIZER
    hooks = {} if of_torch or not any(HOOKS_OF_OPTIMIZERS.values()) else HOOKS_OF_OPTIMIZERS
    return {f"{OPTIMIZER}s' {name}": table for name, table in hooks.items()} | {
        f"{path} {name}".rstrip(): single
        for name, single in optimizers_of(optimizer).items()
        if of_torch == (type(single).__module__.startswith("torch.") and not is_surrounded(single))
    }


def is_in_pieces(optimizer: Optimizer) -> bool:
    """Return whether a loop is running whose workers each have only pieces of the state."""
    return any(
        isinstance(single.state, StateInPieces) and single.state.bring is None
        for single in optimizers_of(optimizer).values()
    )


def check_in_place(optimizer: Optimizer, shown: Mapping[str, StateInPieces]) -> None:
    """Raise RuntimeError if the program has replaced ``optimizer.state``."""
    for name, single in optimizers_of(optimizer).items():
        if single.state is not shown[name]:
            _refuse("the program has put another in its place")
