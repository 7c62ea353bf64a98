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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from unisono.stages.flight import Flight
from unisono.stages.held import Held, held, note, tensors_in, with_tensors
from unisono.stages.journey import Journey, Notes
from unisono.stages.operations import (
    ANYWHERE,
    DEVICES,
    HOOKS,
    INDEXING,
    REFUSED,
    RESHAPING,
    changed_by,
    name_of_operation,
)
from unisono.stages.stand_ins import StandIns

_Tensor = torch.Tensor


class StageMode(TorchFunctionMode):
    """Computes one stage of a model. Final; entered once for many shards.

    Attributes:
        journey: see above.
        is_active: whether a shard's forward pass is under way.
    """

    def __init__(self, journey: Journey, stage: int, device: torch.device) -> None:
        super().__init__()
        self.journey = journey
        self._stage, self._device = stage, device
        self._stand_ins = StandIns()
        self.is_active = False
        self._again: Flight | None = None

    def begin(self, flight: Flight) -> None:
        """Begin a shard's forward pass."""
        self.journey.begin(flight)
        self.is_active = True

    def end(self, returned: Any) -> Any:
        """End it.

        Args:
            returned: by the program; its values come to the place.

        Returns:
            The same with values at the place; None elsewhere.
        """
        self.is_active = False
        tensors = tensors_in(returned)
        self.journey.cross([(tensor, self.journey.note_of(tensor)) for tensor in tensors])
        if not self.journey.is_here:
            return None
        return with_tensors(returned, {id(one): self.journey.value_of(one) for one in tensors})

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
        if stage > self.journey.place:
            self.journey.move_to(stage)
        if stage != self.journey.place:
            return None
        notes = [(tensor, self.journey.note_of(tensor)) for tensor in tensors_in(args)]
        self.journey.cross(notes)
        if not self.journey.is_here:
            return None
        values = {}
        for tensor, found in notes:
            if found is not None and found.value is not None:
                values[id(tensor)] = found.value
                if held(found.value) is None:
                    note(found.value, Held(self.journey.place))
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
        journey = self.journey
        notes = [(tensor, journey.note_of(tensor)) for tensor in tensors_in(args, kwargs)]
        homes = [journey.home_of(tensor, found) for tensor, found in notes if found is not None]
        furthest = max(homes, default=-1)
        if furthest < 0:
            return self._alike(func, args, kwargs)
        if func in REFUSED:
            raise RuntimeError(
                f"gradients must be left to the run where a model is cut into stages, since each "
                f"stage has a part of the graph, but `{name_of_operation(func)}` was called in the "
                f"loss function: return the loss."
            )
        if furthest > self.journey.place:
            self.journey.move_to(furthest)
        if kwargs.get("generator") is not None:
            raise RuntimeError(
                f"random numbers must come from torch's default generator where a model is cut "
                f"into stages, but `{name_of_operation(func)}` was given another one: leave "
                f"`generator` out."
            )
        self.journey.check_views(notes)
        self.journey.note_stage_computes()
        if func in HOOKS:
            self.journey.check_hook(notes[0][1])
            if not self.journey.is_here:
                return _NoHook()
        self.journey.cross(notes, is_use=True)
        if self.journey.is_here:
            return self._here(func, args, kwargs, notes)
        return self._elsewhere(func, args, kwargs, notes)

    @contextmanager
    def recomputing(self, flight: Flight) -> Iterator[None]:
        """Have a shard's backward pass, in a block, compute parts of the forward pass once more."""
        self._again = flight
        try:
            yield
        finally:
            self._again = None

    def _compute_again(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], flight: Flight
    ) -> Any:
        """Compute an operation of a checkpointed function, of this stage, in a backward pass."""
        flight.correct_generators()
        notes = [(tensor, held(tensor)) for tensor in tensors_in(args, kwargs)]
        if values := _values_of(notes):
            args, kwargs = with_tensors(args, values), with_tensors(kwargs, values)
        return func(*args, **kwargs)

    def _alike(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute what depends on no stage: on all workers."""
        if not self.journey.is_apart:  # all draw the same
            return func(*args, **kwargs)
        before = self.journey.flight.generators()
        result = func(*args, **kwargs)
        if not torch.equal(before, self.journey.flight.generators()):
            tensors = tensors_in(result)
            if self.journey.is_here:
                for tensor in tensors:
                    self.journey.add_note(tensor)
            else:
                made = {id(tensor): self._stand_ins.of(tensor) for tensor in tensors}
                result = with_tensors(result, made)
                for stand_in in made.values():
                    self.journey.add_note(stand_in)
        return result

    def _here(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        notes: Notes,
    ) -> Any:
        """Compute an operation of this stage."""
        if others := _values_of(notes):
            args, kwargs = with_tensors(args, others), with_tensors(kwargs, others)
        alike = [(t, t._version) for t, found in notes if found is None]
        result = func(*args, **kwargs)
        changed = changed_by(func, args=args, kwargs=kwargs)
        by_value = {id(others.get(id(tensor), tensor)): tensor for tensor, _ in notes}
        for value in changed:
            self.journey.change(by_value.get(id(value), value))
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
        notes: Notes,
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
                f"stage {self._stage} must know the shapes of what stage {self.journey.place} "
                f"computes without its values, but `{name_of_operation(func)}` cannot be known "
                f"without them ({_first_line(error)}): return tensors instead of numbers from a "
                f"loss function, and take `.item()`, masks that select rows, and decisions on "
                f"values out of the model."
            ) from error
        if changed and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            for tensor in changed:
                stand_in = stand_ins[id(tensor)]
                if (
                    stand_in.is_floating_point()
                    and stand_in.is_leaf
                    and not self.journey.is_buffer(tensor)
                ):
                    stand_in.requires_grad_()
        for tensor in changed:
            self.journey.change(tensor, stand_ins[id(tensor)])
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

    def _with_positions(self, args: tuple[Any, ...], notes: Notes) -> tuple[tuple[Any, ...], Notes]:
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
        return args, [(tensor, self.journey.note_of(tensor)) for tensor in tensors_in(args)]

    def _noted_result(self, result: Any, by_value: dict[int, torch.Tensor]) -> Any:
        """Note where results are; give the program its own tensors in the place of their values."""
        if isinstance(result, _Tensor):
            return self._result(result, by_value)
        if found := tensors_in(result):
            return with_tensors(result, {id(one): self._result(one, by_value) for one in found})
        return result

    def _result(self, tensor: torch.Tensor, by_value: dict[int, torch.Tensor]) -> torch.Tensor:
        given = by_value.get(id(tensor))
        if given is not None:
            return given
        if held(tensor) is None:
            self.journey.add_note(tensor)
        return tensor


class _NoHook:
    """What registering a hook gives where there is no gradient. Final."""

    def remove(self) -> None:
        """Nothing is to be removed."""


def _values_of(notes: Notes) -> dict[int, torch.Tensor]:
    """Give what stands for tensors on this worker, by their ids, where it is another object."""
    return {id(t): at.value for t, at in notes if at is not None and at.value is not None}


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
