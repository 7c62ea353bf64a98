"""Which devices is a model split over? What a program says, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.device import Device, count_of, read_name
from unisono.world import World, workers_per_gpu

_EXAMPLE = '`["cuda:0", "cuda:1"]`'


def places_of(devices: Sequence[str | torch.device], world: World) -> list[torch.device]:
    """Find torch's devices, accelerators with their numbers.

    Args:
        devices: all with a number, the same for every worker, or all without: then each worker has
            as many of its own.
        world: the worker's place.

    Raises:
        TypeError: `devices` is no list of names of devices.
        ValueError: they are of several types, one is named twice, or one is not there.
    """
    names = _read_names(devices)
    kind = names[0].type
    if Device.is_hosts(kind):
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
    """Give the numbers of accelerators."""
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
            f"`devices` must name each device once, but {names[0].type}:{twice} is there "
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
