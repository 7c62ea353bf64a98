"""``unisono.split``: put consecutive parts of a model on several devices.

In place: parameters, names and state dicts stay. A module whose parts are on several devices, or
that is a unit, has an instance attribute ``forward``, which calls the ``forward`` of its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from unisono.engine.splitting.balance import Unit, assigned, divide, is_divided, units_of
from unisono.engine.splitting.device_transfers import device_transfers
from unisono.engine.state.contents import (
    check_module,
    check_unwrapped,
    move_in_place,
    owners_of_buffers,
)
from unisono.runtime.device import HOST, Device, count_of, read_name
from unisono.runtime.notices import say, size
from unisono.runtime.world import World, workers_per_gpu, world

BY_MEMORY = "memory"
Devices = Sequence["str | torch.device"]
Balance = str | Mapping[Any, Sequence[str]]


def split(model: nn.Module, devices: Devices, balance: Balance = BY_MEMORY) -> nn.Module:
    """Place consecutive parts of a model on several devices of this process, in place.

    For models that do not fit on one device. Parameters remain the same objects, and names, state
    dicts and digests do not change, so a checkpoint of a split model loads into an unsplit one and
    the other way round. Activations are copied between devices as needed, and dropout draws the
    same numbers as on one device: results have the same bits. Only one device computes at a time.

    The model expects its inputs on the first device and returns its outputs on the device of the
    last operation. Pass it to :class:`unisono.Trainer` or :class:`unisono.Run` without `device`. In
    a plain loop, move the targets to the outputs (``targets.to(outputs.device)``), and call
    ``backward`` within ``torch.autograd.set_multithreading_enabled(False)``, as autograd otherwise
    uses one thread for each device and adds gradients in the order of their arrival.

    Args:
        model: the whole model, before or after its optimizer is created. Layers without parameters
            run on the device of their inputs. A parameter that several layers share is stored with
            the first of them and copied to the others.
        devices: torch devices of one type, in order, such as ``["cuda:0", "cuda:1"]``. Without
            numbers (``["cuda"] * 2``) workers use separate ones. One device undoes the split.
        balance: ``"memory"`` minimizes the memory of the fullest device: parameters, gradients and
            two more copies for an optimizer such as Adam, in bytes, of consecutive layers in the
            order in which they are registered. Or a dict from devices (or their indices in
            `devices`) to names of layers or of modules that contain them, in any order; the longest
            matching name counts.

    Returns:
        The model.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a device does not exist, the model has fewer parts than there are devices, a
            layer is not assigned to a device, layers on several devices share a buffer, or the
            model is compiled, TorchScript, wrapped or has uninitialized parameters.
    """
    there = places_of(devices, world())
    check_can_be_cut(model)
    units = units_of(model)
    found = _assign(units, there, balance)
    _describe_too_large(units, [there[found[unit.name]] for unit in units])
    parts = Split(there, found)
    check_buffers(model, parts)
    join(model)
    cut(model, parts)
    return model


def check_can_be_cut(model: nn.Module) -> None:
    """Raise an error for an argument that is no model, or a model that cannot be split."""
    check_module("model", model)
    check_unwrapped(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"a model must have its shapes before it is split, but `{name}` is lazy: run it "
                f"once on one batch first."
            )
    for name, module in model.named_modules():
        is_script = isinstance(module, torch.jit.ScriptModule)
        if is_script or getattr(module, "_compiled_call_impl", None) is not None:
            what = "TorchScript" if is_script else "compiled"
            raise ValueError(
                f"a model must run in Python to be split, but `{name or 'model'}` is {what}: "
                f"split the plain model."
            )


def _assign(
    units: Sequence[Unit], devices: Sequence[torch.device], balance: Balance
) -> dict[str, int]:
    """Return the place of each unit among the devices, by the unit's name."""
    names = [unit.name for unit in units]
    if isinstance(balance, Mapping):
        places: dict[Any, int] = {}
        for at, device in enumerate(devices):
            places[at] = at
            places.setdefault(str(device), at)
        read = {_key(device): named for device, named in balance.items()}
        found = assigned(read, places, names, [bool(unit.parameters) for unit in units])
        return dict(zip(names, found, strict=True))
    if balance != BY_MEMORY:
        raise ValueError(
            f"`balance` must be {BY_MEMORY!r} or names by device, but is {balance!r}: pass for "
            f'example `{{0: ["embed"], 1: ["blocks", "head"]}}`.'
        )
    found = divide([unit.num_bytes for unit in units], len(devices))
    return dict(zip(names, found, strict=True))


def _describe_too_large(units: Sequence[Unit], devices: Sequence[torch.device]) -> None:
    """Report which layer alone is larger than its device, as no cut between layers helps there."""
    for unit, device in zip(units, devices, strict=True):
        _, room = Device(device).room()
        if unit.num_bytes > room:
            say(
                f"`{unit.name}` alone takes {size(unit.num_bytes)} in training, with gradients and "
                f"Adam's state, and {device} has {size(room)}: `split` puts each layer on one "
                f"device, so make this one smaller, or train it with an optimizer of less state"
            )


def _key(device: Any) -> Any:
    return device if isinstance(device, int) else str(device)


_EXAMPLE = '`["cuda:0", "cuda:1"]`'


def places_of(devices: Sequence[str | torch.device], world: World) -> list[torch.device]:
    """Return the devices as torch's, accelerators with their numbers.

    All have a number, the same for every worker, or none: then each worker has separate devices.
    """
    names = _read_names(devices)
    kind = names[0].type
    if kind == HOST:
        return [torch.device(kind)] * len(names)
    places = [torch.device(kind, place) for place in _places(names, world)]
    _check_there(places, world)
    return places


def _read_names(devices: Any) -> list[torch.device]:
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(
            f"`devices` must be a list of devices, such as {_EXAMPLE}, but is {devices!r}."
        )
    if not devices:
        raise ValueError(
            f"`devices` must name at least one device, but is empty: pass for example {_EXAMPLE}."
        )
    names = [read_name(name, "devices") for name in devices]
    if len({name.type for name in names}) > 1:
        raise ValueError(
            f"`devices` must be of one type, as others compute other bits, but are "
            f"{[str(name) for name in names]}: leave out those of one type."
        )
    return names


def _places(names: Sequence[torch.device], world: World) -> list[int]:
    """Return the numbers of accelerators."""
    numbers = [name.index for name in names if name.index is not None]
    if not numbers:
        first = world.local_rank // workers_per_gpu() * len(names)
        return list(range(first, first + len(names)))
    if len(numbers) < len(names):
        raise ValueError(
            f"`devices` must all have a number, or none, but are {[str(n) for n in names]}: write "
            f'`["{names[0].type}"] * {len(names)}` for {len(names)} of each worker\'s own.'
        )
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(
            f"`devices` must name each device once, but {names[0].type}:{twice} is listed "
            f"{numbers.count(twice)} times: to have several workers share it, start them with "
            f"`--workers-per-gpu`."
        )
    return numbers


def _check_there(places: Sequence[torch.device], world: World) -> None:
    kind, count = places[0].type, count_of(places[0].type)
    if count == 0:
        raise ValueError(
            f"`devices` must be there, but torch finds no {kind!r} device on this machine: pass "
            f'`["cpu"] * {len(places)}` to try the program on the CPU.'
        )
    missing = [str(place) for place in places if place.index >= count]
    if missing:
        raise ValueError(
            f"`devices` must be there for each worker, but worker {world.local_rank} of this host "
            f"would need {', '.join(missing)} and there are {count}: name fewer, or start fewer "
            f"workers (`unisono run -n {max(count // len(places), 1)}`)."
        )


_NOT_CAST = (nn.Embedding, nn.EmbeddingBag)  # by autocast


@final
class Split:
    """The devices of the parts of a model.

    Attributes:
        devices: the devices of the parts, in order.
        of_units: the place of each unit in `devices`, by the unit's name.
    """

    def __init__(self, devices: Sequence[torch.device], of_units: Mapping[str, int]) -> None:
        self.devices, self.of_units = tuple(devices), dict(of_units)

    def place(self, model: nn.Module) -> None:
        """Move every parameter and buffer of a model to its device; they stay the same objects."""
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


@final
class SplitForward:
    """Replaces the ``forward`` of a module of a split model.

    Args:
        place: the place of a unit; None if the module's parts are on several devices.
        is_alone: see :class:`Unit`.
    """

    def __init__(
        self, module: nn.Module, split: Split, place: int | None, *, is_alone: bool
    ) -> None:
        self._module, self.split = module, split
        self._place, self._is_alone = place, is_alone
        self._before = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on its device."""
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
        """Restore the module's former ``forward``."""
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before


def check_buffers(model: nn.Module, split: Split) -> None:
    """Raise ValueError if layers on several devices share a buffer, which passes may change."""
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
    """Raise ValueError for shared weights that autocast would cast on each of several devices.

    On one device it casts them once, so gradients would be added up in a different precision.
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
    return {
        id(module): (unit.name, split.of_units[unit.name])
        for unit in units_of(model)
        if unit.module is not None
        for module in unit.module.modules()
    }


def cut(model: nn.Module, split: Split) -> None:
    """Split a model that is whole, and move its parts to their devices."""
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
    """Return how a model is split; None if it is not."""
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
