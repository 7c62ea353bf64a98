"""What would an operation of another stage return? Tensors without memory, of the right shapes.

torch computes shapes on its ``meta`` device, partly in Python, which takes up to a millisecond for
one operation. What it found is remembered by the shapes of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from unisono.stages.held import tensors_in, with_tensors

_REMEMBERED_AT_MOST = 1 << 14
META = torch.device("meta")


class _Spec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _Argument(NamedTuple):
    """The tensor at a position among the arguments', given back as it is."""

    position: int


class StandIns:
    """Computes shapes instead of values. Final."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a stand-in of a tensor."""
        return tensor if tensor.is_meta else _made(_spec(tensor))

    def compute(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        stand_ins: dict[int, torch.Tensor],
    ) -> Any:
        """Give what an operation returns, with stand-ins for tensors, new ones or of arguments.

        Args:
            func: the operation.
            args, kwargs: its arguments.
            tensors: those among them, in their order.
            stand_ins: of all of them, by their ids.
        """
        key: Hashable = None
        known: _Result | None = None
        try:
            key = (
                func,
                torch.is_grad_enabled(),
                _key(args, stand_ins),
                _key(kwargs, stand_ins),
                _repeats(tensors),
            )
            known = self._known.get(key)
        except TypeError:  # something has no hash
            key = None
        given = [stand_ins[id(tensor)] for tensor in tensors]
        if known is None:
            result = func(*with_tensors(args, stand_ins), **with_tensors(kwargs, stand_ins))
            if key is None:
                return result
            known = _described(result, given)
            if len(self._known) >= _REMEMBERED_AT_MOST:
                self._known.clear()
            self._known[key] = known
        return _made_of(known, given)


def _repeats(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Say which tensors are the same ones."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(one), at) for at, one in enumerate(tensors)])


def _spec(tensor: torch.Tensor) -> _Spec:
    return _Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


def _key(value: Any, stand_ins: dict[int, torch.Tensor]) -> Hashable:
    if isinstance(value, torch.Tensor):
        return _spec(stand_ins[id(value)])
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_key(one, stand_ins) for one in value])
    if isinstance(value, dict):
        return tuple([(name, _key(one, stand_ins)) for name, one in value.items()])
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    if isinstance(value, (bool, int, float)):
        return type(value), value  # True is 1, and 1 is 1.0
    hash(value)
    key: Hashable = value
    return key


def _described(result: Any, given: list[torch.Tensor]) -> Any:
    """Describe what came of an operation: specs in the place of tensors."""
    places = {id(tensor): _Argument(at) for at, tensor in enumerate(given)}
    parts = {id(one): places.get(id(one)) or _spec(one) for one in tensors_in(result)}
    return _Result(result, parts)


class _Result(NamedTuple):
    like: Any
    parts: dict[int, _Argument | _Spec]


def _made_of(known: _Result, given: list[torch.Tensor]) -> Any:
    made = {
        one: given[part.position] if isinstance(part, _Argument) else _made(part)
        for one, part in known.parts.items()
    }
    return with_tensors(known.like, made)


def _made(spec: _Spec) -> torch.Tensor:
    return torch.empty_strided(
        spec.shape,
        spec.stride,
        dtype=spec.dtype,
        device=META,
        requires_grad=spec.requires_grad,
    )
