"""Runs a shard's forward pass on one stage's worker: its own operations, and stand-ins for others.

Every worker of a replica runs the program's whole loss function. A *place* goes through the stages
with it, from the first to the last, on all workers alike::

    place 0   embed  blocks.0      worker 0 computes      worker 1 has stand-ins
    place 1   blocks.1  head  loss worker 0 has stand-ins worker 1 computes

An operation is computed at the place; one that uses a parameter, or a layer, of a later stage moves
the place there. Where it needs a value that the place does not have yet, that value *crosses*: the
stage that has it sends it, and the stage at the place receives it, in the midst of both programs.
What depends on neither parameters nor other stages, such as masks and targets, all compute.

The place never goes back. So all that a later stage computes was created later, autograd
differentiates it first, and what several stages add to one gradient is added up in the order of
one process. So it is with random numbers, too: where the place moves, the generator's state goes
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from unisono.device import HOST
from unisono.stages.held import Held, forget, held, note, tensors_in, with_tensors
from unisono.stages.operations import (
    ANYWHERE,
    DEVICES,
    HOOKS,
    INDEXING,
    REFUSED,
    RESHAPING,
    changed_by,
    checkpointed_region,
    name_of_operation,
)
from unisono.stages.stand_ins import StandIns

_Tensor = torch.Tensor


class Crossings(Protocol):
    """Brings values from one stage to another."""

    def send(self, stage: int, tensor: torch.Tensor) -> None:
        """Send a value to a later stage."""

    def receive(self, stage: int) -> torch.Tensor:
        """Wait for a value of an earlier stage."""

    def lend(self, stage: int, parameter: torch.Tensor) -> None:
        """Have a later stage compute with a parameter of this one."""

    def borrow(self, stage: int, parameter: torch.Tensor) -> torch.Tensor:
        """Compute with a parameter of an earlier stage."""

    def hand_on(self, stage: int) -> None:
        """Tell a later stage where the generators stand."""

    def take_on(self, stage: int) -> None:
        """Have the generators where an earlier stage has left them."""

    def generators(self) -> torch.Tensor:
        """Tell where the generators stand, as bytes."""

    def correct_generators(self) -> None:
        """Have them where `take_on` had them, if they are where they were before it."""


class StageMode(TorchFunctionMode):
    """Computes one stage of a model. Final; entered once for many shards.

    Args:
        stage: this worker's.
        stage_of: the stage of each parameter, by its id.
        buffers: the ids of the model's buffers.
        device: where this stage computes.

    Attributes:
        place: the stage that computes now.
        is_active: whether a shard's forward pass is under way.
    """

    def __init__(
        self,
        stage: int,
        stage_of: Mapping[int, int],
        buffers: frozenset[int],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._device = device
        self._stage, self._stage_of, self._buffers = stage, stage_of, buffers
        self._stand_ins = StandIns()
        self.place, self.is_active = 0, False
        self._parameters: dict[int, Held] = {}
        self._noted: list[torch.Tensor] = []
        self._moved: dict[int, tuple[torch.Tensor, int]] = {}
        self._is_apart = False
        self._again: Crossings | None = None

    def begin(self, crossings: Crossings) -> None:
        """Begin a shard's forward pass."""
        for tensor in self._noted:
            forget(tensor)
        self._noted.clear()
        self._parameters.clear()
        self._moved.clear()
        self._crossings = crossings
        self.place, self.is_active, self._is_apart = 0, True, False
        self._region: object = None

    def end(self, returned: Any) -> Any:
        """End it.

        Args:
            returned: by the program; its values come to the place.

        Returns:
            The same with values at the place; None elsewhere.
        """
        self.is_active = False
        tensors: list[torch.Tensor] = []
        tensors_in(returned, tensors)
        self._cross([(tensor, self._held(tensor)) for tensor in tensors])
        if self.place != self._stage:
            return None
        return with_tensors(returned, {id(one): self._value(one) for one in tensors})

    def holder_of(self, tensor: torch.Tensor) -> int | None:
        """Tell which stage has changed a buffer in the pass; None: all alike, or none has."""
        found = held(tensor)
        return None if found is None else found.newest

    def enter(self, stage: int, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Come to a layer of a stage; gives other arguments for it, or None."""
        if not self.is_active:
            return None
        self.is_active = False  # what follows is not the program's
        try:
            return self._enter(stage, args)
        finally:
            self.is_active = True

    def _enter(self, stage: int, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if stage > self.place:
            self._move_to(stage)
        if stage != self.place:
            return None
        tensors: list[torch.Tensor] = []
        tensors_in(args, tensors)
        notes = [(tensor, self._held(tensor)) for tensor in tensors]
        self._cross(notes)
        if self.place != self._stage:
            return None
        values = {}
        for tensor, found in notes:
            if found is not None and found.value is not None:
                values[id(tensor)] = found.value
                if held(found.value) is None:
                    note(found.value, Held(self.place))
        return with_tensors(args, values) if values else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute an operation, or its shapes."""
        kwargs = kwargs or {}
        if self._again is not None:
            return self._compute_again(func, args, kwargs, self._again)
        if not self.is_active or func in ANYWHERE:
            return func(*args, **kwargs)
        if func in DEVICES:
            return func(torch.empty(0, device=self._device) if args[0].is_meta else args[0])
        tensors: list[torch.Tensor] = []
        tensors_in(args, tensors)
        if kwargs:
            tensors_in(kwargs, tensors)
        notes = [(tensor, self._held(tensor)) for tensor in tensors]
        furthest = max([-1, *[self._home(t, found) for t, found in notes if found is not None]])
        if furthest < 0:
            return self._alike(func, args, kwargs)
        if func in REFUSED:
            raise RuntimeError(
                f"gradients must be left to the run where a model is cut into stages, since each "
                f"stage has a part of the graph, but `{name_of_operation(func)}` was called in the "
                f"loss function: return the loss."
            )
        if furthest > self.place:
            self._move_to(furthest)
        if kwargs.get("generator") is not None:
            raise RuntimeError(
                f"random numbers must come from torch's default generator where a model is cut "
                f"into stages, but `{name_of_operation(func)}` was given another one: leave "
                f"`generator` out."
            )
        if self._moved:
            self._check_views(notes)
        self._is_apart, self._region = True, checkpointed_region()
        if func in HOOKS:
            self._check_hook(notes[0][1])
            if self.place != self._stage:
                return _NoHook()
        self._cross(notes, is_use=True)
        if self.place == self._stage:
            return self._here(func, args, kwargs, notes)
        return self._elsewhere(func, args, kwargs, notes)

    @contextmanager
    def recomputing(self, crossings: Crossings) -> Iterator[None]:
        """Have a shard's backward pass, in a block, compute parts of the forward pass once more."""
        self._again = crossings
        try:
            yield
        finally:
            self._again = None

    def _compute_again(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], crossings: Crossings
    ) -> Any:
        """Compute an operation of a checkpointed function, of this stage, in a backward pass."""
        crossings.correct_generators()
        tensors: list[torch.Tensor] = []
        tensors_in(args, tensors)
        tensors_in(kwargs, tensors)
        notes = ((tensor, held(tensor)) for tensor in tensors)
        values = {id(t): at.value for t, at in notes if at is not None and at.value is not None}
        if values:
            args, kwargs = with_tensors(args, values), with_tensors(kwargs, values)
        return func(*args, **kwargs)

    def _held(self, tensor: torch.Tensor) -> Held | None:
        found = held(tensor)
        if found is None:
            home = self._stage_of.get(id(tensor))
            if home is not None:
                found = self._parameters.get(id(tensor))
                if found is None:
                    found = self._parameters[id(tensor)] = Held(home, is_parameter=True)
            elif tensor.is_meta:
                raise RuntimeError(
                    "a model that is cut into stages must compute with torch's functions and "
                    "layers, but a tensor of another stage came out of something else, such as "
                    "TorchScript or an extension: have it within one stage, or write it in Python."
                )
        return found

    def _home(self, tensor: torch.Tensor, found: Held) -> int:
        return self._stage_of[id(tensor)] if found.is_parameter else found.newest

    def _alike(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute what depends on no stage: on all workers."""
        if not self._is_apart:  # all draw the same
            return func(*args, **kwargs)
        before = self._crossings.generators()
        result = func(*args, **kwargs)
        if not torch.equal(before, self._crossings.generators()):
            tensors: list[torch.Tensor] = []
            tensors_in(result, tensors)
            if self.place == self._stage:
                for tensor in tensors:
                    self._note(tensor)
            else:
                made = {id(tensor): self._stand_ins.of(tensor) for tensor in tensors}
                result = with_tensors(result, made)
                for stand_in in made.values():
                    self._note(stand_in)
        return result

    def _move_to(self, stage: int) -> None:
        """Have a later stage compute from here on, with the random numbers that come next.

        Raises:
            RuntimeError: a checkpointed function, which is to be computed again as a whole, has
                begun on another stage.
        """
        region = checkpointed_region()
        if region is not None and region is self._region:
            raise RuntimeError(
                "a function that is checkpointed must be computed by one stage as a whole, but "
                "another stage begins within it: pass `balance` with its layers in one stage, or "
                "checkpoint the parts."
            )
        if self.place == self._stage:
            self._crossings.hand_on(stage)
        elif stage == self._stage:
            self._crossings.take_on(self.place)
        self.place = stage

    def _cross(
        self, notes: list[tuple[torch.Tensor, Held | None]], *, is_use: bool = False
    ) -> None:
        """Bring values to the place that it does not have."""
        place, mine = self.place, self._stage
        for tensor, found in notes:
            if found is None:
                continue
            source = found.source(place)
            if source is None:
                found.is_used = found.is_used or is_use
                continue
            if found.is_parameter and found.is_used and _casts():
                raise RuntimeError(
                    "a parameter that two stages compute with must be in float32 there, as torch "
                    "adds up its gradients in the lower precision otherwise, but autocast is on: "
                    "have both layers in one stage, or leave `precision` out."
                )
            found.holders = (*found.holders, place)
            found.is_used = found.is_used or is_use
            if mine == source:
                value = tensor if found.value is None else found.value
                if found.is_parameter:
                    self._crossings.lend(place, value)
                else:
                    self._crossings.send(place, value)
            elif mine == place:
                if found.is_parameter:
                    found.value = self._crossings.borrow(source, tensor)
                else:
                    found.value = self._crossings.receive(source)
                    _warn_gradients(tensor)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._held(tensor)
        return tensor if found is None or found.value is None else found.value

    def _here(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        notes: list[tuple[torch.Tensor, Held | None]],
    ) -> Any:
        """Compute an operation of this stage."""
        others = {
            id(tensor): found.value
            for tensor, found in notes
            if found is not None and found.value is not None
        }
        if others:
            args, kwargs = with_tensors(args, others), with_tensors(kwargs, others)
        alike = [(t, t._version) for t, found in notes if found is None]
        result = func(*args, **kwargs)
        changed = changed_by(func, args=args, kwargs=kwargs)
        by_value = {id(others.get(id(tensor), tensor)): tensor for tensor, _ in notes}
        for value in changed:
            self._change(by_value.get(id(value), value))
        for tensor, version in alike:
            if tensor._version != version and held(tensor) is None:
                raise RuntimeError(
                    f"what all stages have must be changed by all of them alike, but "
                    f"`{name_of_operation(func)}` has changed a tensor of shape "
                    f"{tuple(tensor.shape)} in stage {self._stage} alone: write it with "
                    f"functions that say so, such as `copy_`."
                )
        return self._noted_result(result, by_value)

    def _elsewhere(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        notes: list[tuple[torch.Tensor, Held | None]],
    ) -> Any:
        """Compute the shapes of an operation of another stage."""
        if func in INDEXING:
            args, notes = self._with_positions(args, notes)
        stand_ins = {id(tensor): self._stand_in(tensor, found) for tensor, found in notes}
        tensors = [tensor for tensor, _ in notes]
        changed = changed_by(func, args=args, kwargs=kwargs)
        try:
            if changed and name_of_operation(func) in RESHAPING:
                with torch.no_grad():
                    result = func(*with_tensors(args, stand_ins), **with_tensors(kwargs, stand_ins))
            else:
                with torch.set_grad_enabled(torch.is_grad_enabled() and not changed):
                    result = self._stand_ins.compute(func, args, kwargs, tensors, stand_ins)
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(
                f"stage {self._stage} must know the shapes of what stage {self.place} computes "
                f"without its values, but `{name_of_operation(func)}` cannot be known without them "
                f"({_first_line(error)}): return tensors instead of numbers from a loss function, "
                f"and take `.item()`, masks that select rows, and decisions on values out of the "
                f"model."
            ) from error
        if changed and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            for tensor in changed:
                stand_in = stand_ins[id(tensor)]
                if (
                    stand_in.is_floating_point()
                    and stand_in.is_leaf
                    and id(tensor) not in (self._buffers)
                ):
                    stand_in.requires_grad_()
        for tensor in changed:
            self._change(tensor, stand_ins[id(tensor)])
        by_value = {id(stand_ins[id(tensor)]): tensor for tensor, _ in notes}
        return self._noted_result(result, by_value)

    def _stand_in(self, tensor: torch.Tensor, found: Held | None) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        if found is None:
            return self._stand_ins.of(tensor)
        if found.stand_in is None:
            found.stand_in = self._stand_ins.of(tensor)
        return found.stand_in

    def _with_positions(
        self, args: tuple[Any, ...], notes: list[tuple[torch.Tensor, Held | None]]
    ) -> tuple[tuple[Any, ...], list[tuple[torch.Tensor, Held | None]]]:
        """Put the positions that a mask selects in its place, if all workers know the mask."""
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        known = {id(tensor) for tensor, found in notes if found is None and not tensor.is_meta}
        is_mask = [
            isinstance(one, _Tensor) and one.dtype in (torch.bool, torch.uint8) and id(one) in known
            for one in index
        ]
        if not any(is_mask):
            return args, notes
        parts: list[Any] = []
        for one, is_one in zip(index, is_mask, strict=True):
            parts += one.nonzero(as_tuple=True) if is_one else [one]
        args = (args[0], tuple(parts), *args[2:])
        tensors: list[torch.Tensor] = []
        tensors_in(args, tensors)
        return args, [(tensor, self._held(tensor)) for tensor in tensors]

    def _change(self, tensor: torch.Tensor, stand_in: torch.Tensor | None = None) -> None:
        """Note that the stage at the place has changed a tensor in place."""
        found = held(tensor)
        if found is not None and found.holders == (self.place,):
            return
        self._moved[tensor.untyped_storage()._cdata] = (tensor, self.place)
        if found is None:
            found = self._note(tensor)
        found.holders = (self.place,)
        if stand_in is not None:
            found.value, found.stand_in = None, None if stand_in is tensor else stand_in

    def _check_hook(self, found: Held | None) -> None:
        """Refuse hooks that would see a part of a gradient."""
        if found is not None and found.holders[0] != self.place:
            raise RuntimeError(
                f"a hook must be registered in the stage that computes the tensor, as it sees the "
                f"whole gradient only there, but stage {self.place} registers one for a tensor of "
                f"stage {found.holders[0]}: register it where the tensor is made."
            )

    def _check_views(self, notes: list[tuple[torch.Tensor, Held | None]]) -> None:
        """Refuse views, made before, of what a later stage has changed: they are out of date."""
        for tensor, found in notes:
            if found is not None and (found.is_parameter or found.newest == self.place):
                continue
            changed, at = self._moved.get(tensor.untyped_storage()._cdata, (tensor, 0))
            if changed is not tensor and (found is None or found.newest < at):
                raise RuntimeError(
                    f"a tensor that stage {at} changes in place must have no views from before, "
                    f"but one of shape {tuple(tensor.shape)} is used behind the change: write "
                    f"`x = x + y` in the place of `x += y`, or clone it first."
                )

    def _noted_result(self, result: Any, by_value: dict[int, torch.Tensor]) -> Any:
        """Note where results are; give the program its own tensors in the place of their values."""
        if isinstance(result, _Tensor):
            return self._result(result, by_value)
        if isinstance(result, (list, tuple, dict)):
            found: list[torch.Tensor] = []
            tensors_in(result, found)
            if found:
                return with_tensors(result, {id(one): self._result(one, by_value) for one in found})
        return result

    def _result(self, tensor: torch.Tensor, by_value: dict[int, torch.Tensor]) -> torch.Tensor:
        given = by_value.get(id(tensor))
        if given is not None:
            return given
        if held(tensor) is None:
            self._note(tensor)
        return tensor

    def _note(self, tensor: torch.Tensor) -> Held:
        made = Held(self.place)
        note(tensor, made)
        if id(tensor) in self._buffers:
            self._noted.append(tensor)
        return made


class _NoHook:
    """What registering a hook gives where there is no gradient. Final."""

    def remove(self) -> None:
        """Nothing is to be removed."""


def _casts() -> bool:
    return torch.is_autocast_enabled(HOST)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__


def _warn_gradients(stand_in: torch.Tensor) -> None:
    """Refuse gradients that would come to a stand-in instead of to the value that crossed."""
    if stand_in.is_meta and stand_in.requires_grad:
        stand_in.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]


def _refuse_gradient(gradient: torch.Tensor) -> None:
    raise RuntimeError(
        "a `torch.autograd.Function` must get values of its own stage, but was given a tensor of "
        "an earlier one: have it in a layer (a module of its own) of the later stage."
    )
