"""A model that is cut: which device each of its units is on, and what that does to its modules.

In place: parameters, names and state dicts stay. A module whose parts are on several devices, or
that is a unit, has a ``forward`` of its own, which calls the one of its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from unisono.engine.splitting.balance import Unit, is_divided, units_of
from unisono.engine.splitting.device_transfers import device_transfers
from unisono.engine.state.contents import move_in_place, owners_of_buffers

_NOT_CAST = (nn.Embedding, nn.EmbeddingBag)  # by autocast


class Split:
    """Where the parts of a model are. Final.

    Attributes:
        devices: those that have parts, in order.
        of_units: by the name of each unit, its place: which of `devices` it is on.
    """

    def __init__(self, devices: Sequence[torch.device], of_units: Mapping[str, int]) -> None:
        self.devices, self.of_units = tuple(devices), dict(of_units)

    def place(self, model: nn.Module) -> None:
        """Have every parameter and buffer of a model on its device, as the objects they are."""
        units, owners = units_of(model), owners_of_buffers(model)
        for unit in units:
            if unit.name not in self.of_units:
                raise ValueError(
                    f"a split model must keep its layers, but `{unit.name}` has come since: call "
                    f"`unisono.split` again, before the optimizer is made."
                )
        # The first unit that has a parameter moves it last.
        for unit in reversed(units):
            _move(model, unit, self.devices[self.of_units[unit.name]])
        for (first, name), *others in owners.values():
            for module, other in others:
                module._buffers[other] = first._buffers[name]


class SplitForward:
    """What a module of a cut model is called by. Final.

    Args:
        module: which.
        split: of the model.
        place: of a unit; None: its parts are on several.
        is_alone: see :class:`Unit`.

    Attributes:
        split: of the model.
    """

    def __init__(
        self, module: nn.Module, split: Split, place: int | None, *, is_alone: bool
    ) -> None:
        self._module, self.split = module, split
        self._place, self._is_alone = place, is_alone
        self._before = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module where it is."""
        forward = self._before or type(self._module).forward.__get__(self._module)
        given = (args, kwargs)
        with device_transfers(self.split.devices, given) as under_way:
            if self._place is None:
                return under_way.bring(forward(*args, **kwargs), None)
            device = self.split.devices[self._place]
            under_way.enter(device)
            args, kwargs = under_way.bring(given, device)
            with under_way.set_aside() if self._is_alone else nullcontext():
                return forward(*args, **kwargs)

    def take_off(self) -> None:
        """Have the module called as before."""
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before


def check_buffers(model: nn.Module, split: Split) -> None:
    """Refuse layers on several devices that have one buffer, which passes may change.

    Raises:
        ValueError: there are such; names them.
    """
    place_of = _devices_of_modules(model, split)
    for name, owners in owners_of_buffers(model).items():
        found = [place_of[id(module)] for module, _ in owners if id(module) in place_of]
        others = [other for other, place in found if place != found[0][1]]
        if others:
            raise ValueError(
                f"layers that have one buffer must be on one device, but `{name}` is a buffer of "
                f"`{found[0][0]}` and of `{others[0]}`, which are on two: name both for one device "
                f"in `balance`."
            )


def check_casts(model: nn.Module) -> None:
    """Refuse weights that autocast would cast once on one device, and on each of several.

    Gradients of all uses are then added up in the lower precision, or in float32.

    Raises:
        ValueError: layers on several devices have one weight.
    """
    split = split_of(model)
    if split is None or len(set(split.devices)) < 2:
        return
    place_of = _devices_of_modules(model, split)
    first: dict[int, tuple[str, int]] = {}
    for module in model.modules():
        if isinstance(module, _NOT_CAST) or id(module) not in place_of:
            continue
        name, place = place_of[id(module)]
        for key, parameter in module._parameters.items():
            other, there = first.setdefault(id(parameter), (name, place))
            if parameter is not None and there != place:
                raise ValueError(
                    f'`precision` must be "fp32" where layers on several devices have one weight, '
                    f"or bits would depend on the cut, but `{name}` has `{key}` in common with "
                    f"`{other}`: name both for one device in `balance`, or leave `precision` out."
                )


def _devices_of_modules(model: nn.Module, split: Split) -> dict[int, tuple[str, int]]:
    """Give, for each module of each unit, the name of that and its place."""
    return {
        id(module): (unit.name, split.of_units[unit.name])
        for unit in units_of(model)
        if unit.module is not None
        for module in unit.module.modules()
    }


def cut(model: nn.Module, split: Split) -> None:
    """Cut a model that is whole, and move its parts to their devices."""
    split.place(model)
    units = {id(unit.module): unit for unit in units_of(model) if unit.module is not None}
    for module in model.modules():
        unit = units.get(id(module))
        if unit is not None:
            place = split.of_units[unit.name]
            module.forward = SplitForward(module, split, place, is_alone=unit.is_alone)
        elif module is model or is_divided(module):
            module.forward = SplitForward(module, split, None, is_alone=False)


def join(model: nn.Module) -> None:
    """Undo :func:`cut`; parameters and buffers stay where they are."""
    for module in model.modules():
        if isinstance(forward := vars(module).get("forward"), SplitForward):
            forward.take_off()


def split_of(model: nn.Module) -> Split | None:
    """Find how a model is cut; None: it is not."""
    forward = vars(model).get("forward")
    return forward.split if isinstance(forward, SplitForward) else None


def _move(model: nn.Module, unit: Unit, device: torch.device) -> None:
    if all(tensor.device == device for tensor in unit.tensors.values()):
        return  # as it is, with its hooks: where objects are swapped, those would be lost
    if unit.module is not None:
        move_in_place(unit.module, device)
    for parameter in unit.parameters.values():
        if parameter.device != device:
            move_in_place(nn.ParameterList([parameter]), device)
    for full_name, buffer in unit.buffers.items():
        name, _, key = full_name.rpartition(".")
        if unit.module is None:
            model.get_submodule(name)._buffers[key] = buffer.to(device)
