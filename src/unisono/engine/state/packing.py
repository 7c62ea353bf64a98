"""Convert values of optimizers, schedules and programs to plain JSON and tensors, and back.

Values that JSON supports stay as they are. All others are objects whose only key begins with ``$``
and names the type: ``{"$tensor": label}``, ``{"$tuple": [1, 2]}``, ``{"$counter": [[30, 1]]}``.

The program's values (``run.state``) may also be objects with ``state_dict`` and
``load_state_dict``: a learning-rate schedule, an average of weights. They stay the same objects;
only their state is saved, as is the extra state of the model's modules.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, final

import numpy as np
import torch
from torch import nn

from unisono.errors import CheckpointError
from unisono.programs.arrays import NUMBERS
from unisono.runtime.device import array_of
from unisono.runtime.dtypes import CODES

Keep = Callable[[str, torch.Tensor], str]
"""Stores a tensor, given its path within a value; returns its label."""
Take = Callable[[str], torch.Tensor]
"""Returns a copy of a tensor, given its label."""

_PLAIN = {type(None), bool, int, float, str}
# What unpacking raises for what was not written here.
_MALFORMED = (LookupError, TypeError, ValueError, OverflowError, RecursionError)
_FACTORIES: dict[str, Callable[[], Any] | None] = {"int": int, "float": float, "list": list}
_FACTORIES |= {"dict": dict, "": None}
_NUMBER = "$number"


def pack(value: Any, path: str, keep: Keep, tell: Callable[[str], str]) -> Any:
    """Convert a value to plain JSON and tensors; raise CheckpointError for what cannot be saved.

    `path` is the value's path; ``/`` and a place are added for items. `keep` stores tensors, `tell`
    describes a path in messages.
    """

    def inner(place: object, item: Any) -> Any:
        return pack(item, f"{path}/{place}", keep, tell)

    if isinstance(value, torch.Tensor):
        check_dtype(tell(path), value)
        return {"$tensor": keep(path, value.detach())}
    if isinstance(value, Mapping):
        items = [[key, inner(key, item)] for key, item in value.items()]
        return _pack_items(value, items, tell(path))
    if type(value) is list and {*map(type, value)} <= _PLAIN:
        return list(value)  # it may be long
    if isinstance(value, (list, tuple, deque, set)):
        elements = [inner(at, item) for at, item in enumerate(value)]
        if isinstance(value, deque):
            return {"$deque": [value.maxlen, elements]}
        if isinstance(value, set):
            return {"$set": elements}
        return {"$tuple": elements} if isinstance(value, tuple) else elements
    if isinstance(value, np.ndarray) and value.dtype.name in NUMBERS:
        copied = np.array(value, NUMBERS[value.dtype.name], order="K")
        return {"$array": keep(path, torch.from_numpy(copied))}
    return pack_number(tell(path), value)


def pack_number(what: str, value: Any) -> Any:
    """Convert a number of numpy to plain JSON; raise CheckpointError for what is not plain."""
    if isinstance(value, np.generic) and value.dtype.name in NUMBERS:
        return {_NUMBER: [value.dtype.name, value.item()]}
    return check_plain(what, value)


def unpack_number(packed: Any) -> Any:
    """Return the number of numpy that was packed; other values as they are."""
    if not isinstance(packed, dict) or [*packed] != [_NUMBER]:
        return packed
    return unpack({_NUMBER: packed}, _no_tensor, "an option of the optimizer")[_NUMBER]


def _no_tensor(label: str) -> torch.Tensor:
    raise LookupError(label)


def unpack(packed: Mapping[str, Any], take: Take, what: str) -> dict[str, Any]:
    """Reassemble, by key, what :func:`pack` converted, or raise CheckpointError."""
    try:
        return {key: _unpack(value, take) for key, value in packed.items()}
    except _MALFORMED as error:
        raise CheckpointError(
            f"{what} must have the form that this version writes, but has not ({error!r:.200})."
        ) from None


def keep_in(tensors: dict[str, torch.Tensor], label: Callable[[str], str]) -> Keep:
    """Return a function that stores tensors under unique labels, made from paths by `label`."""

    def keep(path: str, tensor: torch.Tensor) -> str:
        name = label(path)
        while name in tensors:
            name += "+"
        tensors[name] = tensor
        return name

    return keep


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors within containers, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple, deque)):
        for at, item in enumerate(value):
            yield from tensors_in(item, f"{path}/{at}")


def check_plain(what: str, value: Any) -> Any:
    """Raise CheckpointError unless a value is None, a bool, a number or a string."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"{what} must be a tensor, a number or a text to be kept, but is of type "
        f"{type(value).__name__}."
    )


def check_dtype(what: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError if no checkpoint file can hold the dtype of a tensor."""
    if str(tensor.dtype) not in CODES:
        raise CheckpointError(
            f"{what} must have a dtype that safetensors files support, but is "
            f"{tensor.dtype}: convert it (two real tensors hold a complex one), or train without "
            f"checkpoints."
        )


def _pack_items(value: Mapping[Any, Any], items: list[list[Any]], what: str) -> Any:
    for item in items:
        key = item[0].item() if isinstance(item[0], np.generic) else item[0]
        item[0] = check_plain(f"a key of {what}", key)
    if isinstance(value, Counter):
        return {"$counter": items}
    if isinstance(value, defaultdict):
        factory = getattr(value.default_factory, "__name__", "")
        if _FACTORIES.get(factory) is not value.default_factory:
            raise CheckpointError(
                f"{what} must be a defaultdict of int, float, list or dict to be kept, but is one "
                f"of {value.default_factory!r}: keep a dict instead."
            )
        return {"$default": [factory, items]}
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
        return dict(items)
    return {"$items": items}


def _unpack(value: Any, take: Take) -> Any:
    if isinstance(value, list):
        return [_unpack(item, take) for item in value]
    if not isinstance(value, dict):
        return value
    mark: str = next(iter(value), "")
    content: Any = value.get(mark)
    if not mark.startswith("$"):
        return {key: _unpack(item, take) for key, item in value.items()}
    if mark == "$tensor":
        return take(content)
    if mark == "$array":
        return array_of(take(content))
    if mark == _NUMBER:
        return NUMBERS[content[0]].type(content[1])
    if mark == "$tuple":
        return tuple(_unpack(content, take))
    if mark == "$set":
        return set(_unpack(content, take))
    if mark == "$deque":
        return deque(_unpack(content[1], take), content[0])
    return _unpack_items(mark, content, take)


def _unpack_items(mark: str, content: Any, take: Take) -> Any:
    if mark == "$default":
        factory, content = content
        into: dict[Any, Any] = defaultdict(_FACTORIES[factory])
    else:
        into = {"$items": dict, "$counter": Counter}[mark]()
    for key, item in content:
        into[key] = _unpack(item, take)
    return into


STATE_PREFIX = "run.state/"
"""The prefix of the program's tensors, which are saved with the optimizer's."""


def pack_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Convert the state to plain JSON and the tensors that it refers to.

    Raises:
        CheckpointError: If a key is not a string, or a value cannot be saved.
    """
    tensors: dict[str, torch.Tensor] = {}
    keep = keep_in(tensors, lambda path: STATE_PREFIX + path)
    packed = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(
                f"the keys of `run.state` must be strings, but one is {key!r}: write "
                f'`run.state["{key}"]`, for example.'
            )
        contents = value.state_dict() if hasattr(value, "state_dict") else value
        packed[key] = pack(contents, key, keep, "`{}` in `run.state`".format)
    return packed, tensors


def unpack_state(
    packed: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], state: MutableMapping[str, Any]
) -> None:
    """Load into `state` what :func:`pack_state` returned; objects in it load their own state."""
    for key, contents in unpacked_state(packed, tensors).items():
        if hasattr(state.get(key), "load_state_dict"):
            state[key].load_state_dict(contents)
        elif not _filled(state.get(key), contents):
            state[key] = contents
    for key in [key for key in state if key not in packed]:
        if not hasattr(state[key], "load_state_dict"):
            del state[key]


def _filled(there: Any, contents: Any) -> bool:
    """Fill an object in place, as others may refer to it; return False if it differs.

    A view stays as it is, and is replaced: what it shows may belong to others.
    """
    if isinstance(there, torch.Tensor) and isinstance(contents, torch.Tensor):
        if not (_is_like(there, contents) and _has_own_memory(there)):
            return False
        with torch.no_grad():
            there.copy_(contents)
        return True
    if isinstance(there, np.ndarray) and isinstance(contents, np.ndarray):
        if not (_is_like(there, contents) and there.base is None and there.flags.writeable):
            return False
        there[...] = contents
        return True
    if type(there) is not type(contents) or type(there) not in (list, dict, set, deque):
        return False
    there.clear()
    (there.extend if isinstance(there, (list, deque)) else there.update)(contents)
    return True


def _is_like(there: Any, contents: Any) -> bool:
    return bool((there.shape, there.dtype) == (contents.shape, contents.dtype))


def _has_own_memory(there: torch.Tensor) -> bool:
    """Return whether a tensor is no view, and may be written to."""
    return (
        there.layout is torch.strided
        and there.is_leaf
        and not (there.is_inference() or there._is_view())
        and there.untyped_storage().nbytes() == there.nbytes
    )


def unpacked_state(
    packed: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Reassemble what :func:`pack_state` returned, or raise CheckpointError."""
    return unpack(packed, lambda label: tensors[label].clone(), "`run.state`")


@final
class ExtraState:
    """The extra state of a model's modules (``get_extra_state``), as an object with a state."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def is_empty(self) -> bool:
        """Whether no module has extra state."""
        return not self._modules()

    def state_dict(self) -> dict[str, Any]:
        """Return the extra state of each module."""
        return {name: module.get_extra_state() for name, module in self._modules().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the extra state of each module in `state`; other modules stay unchanged."""
        for name, module in self._modules().items():
            if name in state:
                module.set_extra_state(state[name])

    def _modules(self) -> dict[str, nn.Module]:
        return {
            name: module
            for name, module in self._model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
