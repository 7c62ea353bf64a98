"""One shard's forward pass through the stages: where it is, and which stage has which value.

All workers of a replica keep the same notes, as they all run the same program; see
:mod:`unisono.stages.stage_mode`. Only the two between which a value crosses have more to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unisono.device import HOST
from unisono.stages.flight import Flight
from unisono.stages.held import Held, forget, held, note
from unisono.stages.operations import checkpointed_region

Notes = Sequence[tuple[torch.Tensor, "Held | None"]]


class Journey:
    """The passes of one worker's shards, one after the other. Final.

    Args:
        stage: this worker's.
        stage_of: the stage of each parameter, by its id.
        buffers: the ids of the model's buffers.

    Attributes:
        place: the stage that computes now.
        flight: of the shard under way.
        is_apart: whether a stage has computed something that the others have not.
    """

    flight: Flight

    def __init__(self, stage: int, stage_of: Mapping[int, int], buffers: frozenset[int]) -> None:
        self._stage, self._stage_of, self._buffers = stage, stage_of, buffers
        self.place, self.is_apart = 0, False
        self._parameters: dict[int, Held] = {}
        self._noted: list[torch.Tensor] = []
        self._moved: dict[int, tuple[torch.Tensor, int]] = {}
        self._region: object = None

    def begin(self, flight: Flight) -> None:
        """Begin with another shard."""
        for tensor in self._noted:
            forget(tensor)
        self._noted.clear()
        self._parameters.clear()
        self._moved.clear()
        self.flight, self.place, self.is_apart = flight, 0, False
        self._region = None

    @property
    def is_here(self) -> bool:
        """Whether this worker's stage computes now."""
        return self.place == self._stage

    def note_stage_computes(self) -> None:
        """Note that the stage at the place computes something that the others do not."""
        self.is_apart, self._region = True, checkpointed_region()

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is one of the model's buffers."""
        return id(tensor) in self._buffers

    def note_of(self, tensor: torch.Tensor) -> Held | None:
        """Give a tensor's note; None for what all stages have."""
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

    def home_of(self, tensor: torch.Tensor, found: Held) -> int:
        """Tell the stage that a tensor needs at least."""
        return self._stage_of[id(tensor)] if found.is_parameter else found.newest

    def move_to(self, stage: int) -> None:
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
            self.flight.hand_on(stage)
        elif stage == self._stage:
            self.flight.take_on(self.place)
        self.place = stage

    def cross(self, notes: Notes, *, is_use: bool = False) -> None:
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
                    self.flight.lend(place, value)
                else:
                    self.flight.send(place, value)
            elif mine == place:
                if found.is_parameter:
                    found.value = self.flight.borrow(source, tensor)
                else:
                    found.value = self.flight.receive(source)
                    _warn_gradients(tensor)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give what stands for a tensor on this worker."""
        found = self.note_of(tensor)
        return tensor if found is None or found.value is None else found.value

    def change(self, tensor: torch.Tensor, stand_in: torch.Tensor | None = None) -> None:
        """Note that the stage at the place has changed a tensor in place."""
        found = held(tensor)
        if found is not None and found.holders == (self.place,):
            return
        self._moved[tensor.untyped_storage()._cdata] = (tensor, self.place)
        if found is None:
            found = self.add_note(tensor)
        found.holders = (self.place,)
        if stand_in is not None:
            found.value, found.stand_in = None, None if stand_in is tensor else stand_in

    def check_views(self, notes: Notes) -> None:
        """Refuse views, made before, of what a later stage has changed: they are out of date."""
        if not self._moved:
            return
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

    def check_hook(self, found: Held | None) -> None:
        """Refuse hooks that would see a part of a gradient."""
        if found is not None and found.holders[0] != self.place:
            raise RuntimeError(
                f"a hook must be registered in the stage that computes the tensor, as it sees the "
                f"whole gradient only there, but stage {self.place} registers one for a tensor of "
                f"stage {found.holders[0]}: register it where the tensor is made."
            )

    def add_note(self, tensor: torch.Tensor) -> Held:
        """Note that the stage at the place has a tensor."""
        made = Held(self.place)
        note(tensor, made)
        if id(tensor) in self._buffers:
            self._noted.append(tensor)
        return made

    def holder_of(self, tensor: torch.Tensor) -> int | None:
        """Tell which stage has changed a buffer in the pass; None: all alike, or none has."""
        found = held(tensor)
        return None if found is None else found.newest


def _casts() -> bool:
    return torch.is_autocast_enabled(HOST)


def _warn_gradients(stand_in: torch.Tensor) -> None:
    """Refuse gradients that would come to a stand-in instead of to the value that crossed."""
    if stand_in.is_meta and stand_in.requires_grad:
        stand_in.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]


def _refuse_gradient(gradient: torch.Tensor) -> None:
    raise RuntimeError(
        "a `torch.autograd.Function` must get values of its own stage, but was given a tensor of "
        "an earlier one: have it in a layer (a module of its own) of the later stage."
    )
