"""Where is a model cut? Units with their costs, or names that the user gives ─► places.

A place is the number of a device, in the order in which they are given. Pure: numbers and names in,
the place of each unit out. ::

    costs      3 1 4 1 │ 5 │ 9         the costliest device is as cheap as it can be
    places     0 0 0 0   1   2

Which parts of a model can be computed apart? The units that a model can be cut between.

A unit is a module with parameters or buffers that is not divided further, or a parameter or buffer
that a divided module has itself. Modules are divided into what they consist of, but not torch's own
(attention, recurrent layers), whose code may use what they hold without calling it. Modules without
tensors are no units: they are computed where their inputs are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from unisono.runtime.notices import named


def divide(costs: Sequence[int], num_devices: int) -> list[int]:
    """Divide units among devices, consecutive ones for each and at least one; return their places.

    The largest sum of costs of a device is as small as possible.
    """
    if len(costs) < num_devices:
        raise ValueError(
            f"a model must have a part for each device, but has {len(costs)} parts that can be "
            f"computed separately for {num_devices} devices: pass fewer devices."
        )
    limits = range(sum(costs))
    limit = bisect_left(
        limits, True, max(costs), key=lambda limit: _filled(costs, limit)[-1] < num_devices
    )
    return _filled(costs, limit, num_devices)


def _filled(costs: Sequence[int], limit: int, at_least: int = 1) -> list[int]:
    """Fill one device after another up to a limit; leave a unit for each following device."""
    places, place, total = [0], 0, costs[0]
    for at, cost in enumerate(costs[1:], start=1):
        if total + cost > limit or len(costs) - at < at_least - place:
            place, total = place + 1, 0
        total += cost
        places.append(place)
    return places


def assigned(
    balance: Mapping[Hashable, Sequence[str]],
    places: Mapping[Hashable, int],
    names: Sequence[str],
    needed: Sequence[bool],
) -> list[int]:
    """Place units on the devices that name them; the longest matching name counts.

    Args:
        balance: by device, names of units, or of modules that contain units.
        places: by device, its place.
        names: the names of all units.
        needed: whether a unit must be named; others stay with the unit before them.
    """
    place_of = _read(balance, places, names)
    found: list[int] = []
    missing = []
    for name, is_needed in zip(names, needed, strict=True):
        fitting = [prefix for prefix in place_of if is_within(name, prefix)]
        if fitting:
            found.append(place_of[max(fitting, key=len)])
            continue
        found.append(found[-1] if found else 0)
        if is_needed:
            missing.append(name)
    if missing:
        raise ValueError(
            f"`balance` must say of every layer with parameters where it is, but says nothing of "
            f"{named(missing)}: name them, or what they are within, under one of the devices."
        )
    return found


def is_within(name: str, prefix: str) -> bool:
    """Return whether a unit is the module `prefix` or part of it; ``""`` contains all units."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


def _read(
    balance: Mapping[Hashable, Sequence[str]],
    places: Mapping[Hashable, int],
    names: Sequence[str],
) -> dict[str, int]:
    place_of: dict[str, int] = {}
    for device, prefixes in balance.items():
        if device not in places:
            raise ValueError(
                f"the keys of `balance` must be among `devices`, {named(list(places))}, but one "
                f"is {device!r}: use one of these."
            )
        if isinstance(prefixes, str) or not isinstance(prefixes, Sequence):
            listed = f"[{prefixes!r}]" if isinstance(prefixes, str) else "list(…)"
            raise TypeError(
                f"`balance` must have a list of names for each device, but for {device!r} it has "
                f"{prefixes!r}: write `{listed}`."
            )
        for prefix in prefixes:
            if not isinstance(prefix, str):
                raise TypeError(
                    f"`balance` must have names of layers, as in `named_modules()`, but for "
                    f"{device!r} it has {prefix!r}: write the name of a layer."
                )
            if not any(is_within(name, prefix) for name in names):
                raise ValueError(
                    f"`balance` must name layers with parameters or buffers that are computed "
                    f"apart, but has {prefix!r}: there are {named(names)}."
                )
            if place_of.setdefault(prefix, places[device]) != places[device]:
                raise ValueError(
                    f"`balance` must name each layer once, but names `{prefix}` for two devices: "
                    f"leave one out."
                )
    return place_of


_DIVIDED = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
_OF_TORCH = "torch."


@dataclass(frozen=True)
class Unit:
    """A part of a model that is placed on one device."""

    name: str  # of the module, or of the parameter or buffer
    module: nn.Module | None  # the module; None for a parameter or buffer
    parameters: dict[str, nn.Parameter]  # by their full names, those that no unit before it has
    buffers: dict[str, torch.Tensor]  # in the same way
    # whether it uses no others, as far as is known: it is one of torch's own modules, and all it
    # holds is its own
    is_alone: bool

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return {**self.parameters, **self.buffers}

    @property
    def num_bytes(self) -> int:
        """The memory that training needs: parameters, gradients, Adam's state, buffers."""
        held = sum(p.nbytes * (4 if p.requires_grad else 1) for p in self.parameters.values())
        return held + sum(buffer.nbytes for buffer in self.buffers.values())


def units_of(model: nn.Module) -> list[Unit]:
    """List the units of a model in the order of registration; the first owns tied weights."""
    seen: set[int] = set()
    return list(_units_within(model, "", seen))


def is_divided(module: nn.Module) -> bool:
    """Return whether a module's parts may be on several devices."""
    if isinstance(module, torch.jit.ScriptModule) or parametrize.is_parametrized(module):
        return False
    if not any(_has_tensors(child) for child in module.children()):
        return False
    return isinstance(module, _DIVIDED) or not type(module).__module__.startswith(_OF_TORCH)


def _units_within(module: nn.Module, name: str, seen: set[int]) -> Iterator[Unit]:
    if id(module) in seen or not _has_tensors(module):
        return
    seen.add(id(module))
    if not is_divided(module):
        yield _unit(module, name, seen)
        return
    for full, parameter in module.named_parameters(name, recurse=False):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield Unit(full, None, {full: parameter}, {}, is_alone=False)
    for full, buffer in module.named_buffers(name, recurse=False):
        if id(buffer) not in seen:
            seen.add(id(buffer))
            yield Unit(full, None, {}, {full: buffer}, is_alone=False)
    for key, child in module.named_children():
        yield from _units_within(child, f"{name}.{key}" if name else key, seen)


def _unit(module: nn.Module, name: str, seen: set[int]) -> Unit:
    parameters, buffers = dict(module.named_parameters(name)), dict(module.named_buffers(name))
    num_held = len(parameters) + len(buffers)
    parameters = {full: p for full, p in parameters.items() if id(p) not in seen}
    buffers = {full: b for full, b in buffers.items() if id(b) not in seen}
    seen.update(map(id, (*parameters.values(), *buffers.values())))
    is_alone = num_held == len(parameters) + len(buffers)
    is_of_torch = type(module).__module__.startswith(_OF_TORCH)
    return Unit(name, module, parameters, buffers, is_alone=is_alone and is_of_torch)


def _has_tensors(module: nn.Module) -> bool:
    return bool([*module.parameters(), *module.buffers()])
