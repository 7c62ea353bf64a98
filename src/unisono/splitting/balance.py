"""Where is a model cut? Units with their costs, or names that somebody gives ─► places.

A place is the number of a device, in the order in which they are given. Pure: numbers and names in,
the place of each unit out. ::

    costs      3 1 4 │ 1 5 │ 9         the costliest device is as cheap as it can be
    places     0 0 0   1 1   2

Of all divisions as good as that, one is taken that cuts as far outside as possible: between two
blocks rather than within one, where more than one activation is on its way.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

from unisono.notices import named


def divide(costs: Sequence[int], names: Sequence[str], num_devices: int) -> list[int]:
    """Divide units among devices: consecutive ones for each, and at least one.

    Args:
        costs: of each unit, in order; whole numbers from 0 on.
        names: of each unit, such as ``"blocks.0.norm"``.
        num_devices: how many.

    Returns:
        The place of each unit. The largest sum of costs of a device is the smallest there can be.

    Raises:
        ValueError: there are fewer units than devices.
    """
    if len(costs) < num_devices:
        raise ValueError(
            f"a model must have a part for each device, but has {len(costs)} parts that can be "
            f"computed apart for {num_devices} devices: pass fewer devices."
        )
    limit = _smallest_limit(costs, num_devices)
    starts = _outermost_starts(costs, names, num_devices, limit)
    return [sum(start <= at for start in starts) for at in range(len(costs))]


def _smallest_limit(costs: Sequence[int], num_devices: int) -> int:
    """Find the smallest sum that no device has to exceed."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _num_devices_within(costs, middle) <= num_devices:
            high = middle
        else:
            low = middle + 1
    return low


def _num_devices_within(costs: Sequence[int], limit: int) -> int:
    count, total = 1, 0
    for cost in costs:
        total += cost
        if total > limit:
            count, total = count + 1, cost
    return count


def _outermost_starts(
    costs: Sequence[int], names: Sequence[str], num_devices: int, limit: int
) -> list[int]:
    """Give the first unit of each device but the first: the cuts lie as far outside as they can.

    ``best[n]`` is, with so many devices as there have been rounds, the depth of all cuts together
    where the newest device's units end before unit n, and where they begin.
    """
    num_units, sums = len(costs), [0, *accumulate(costs)]
    depths = [0, *map(_common_depth, names, names[1:])]  # of the cut before each unit
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for _ in range(num_devices):
        reached: dict[int, tuple[int, int]] = {}
        for start, (depth, _) in best[-1].items():
            deeper = depth + (depths[start] if start < num_units else 0)
            for end in range(start + 1, num_units + 1):
                if sums[end] - sums[start] > limit:
                    break
                if end not in reached or deeper < reached[end][0]:
                    reached[end] = (deeper, start)
        best.append(reached)
    starts = [num_units]
    for reached in reversed(best[1:]):
        starts.append(reached[starts[-1]][1])
    return starts[-2:0:-1]


def _common_depth(name: str, other: str) -> int:
    """Count the modules that two units are both within."""
    count = 0
    for one, another in zip(name.split(".")[:-1], other.split(".")[:-1], strict=False):
        if one != another:
            break
        count += 1
    return count


def assigned(
    balance: Mapping[Hashable, Sequence[str]],
    places: Mapping[Hashable, int],
    names: Sequence[str],
    needed: Sequence[bool],
) -> list[int]:
    """Put units where somebody says; the longest name that fits counts.

    Args:
        balance: by device, names of units, or of what several units are within.
        places: by device, its place.
        names: of all units.
        needed: whether a unit has to be named; others go with the unit before them.

    Returns:
        The place of each unit.

    Raises:
        TypeError: names are not given in a list.
        ValueError: a device or a name is not known, two devices have the same name, or a unit is
            named nowhere.
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
    """Tell whether a unit is what `prefix` names, or a part of it; all is a part of ``""``."""
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
                f"`balance` must be by the devices that are given, {named(list(places))}, but "
                f"has {device!r}: name one of them."
            )
        if isinstance(prefixes, str) or not isinstance(prefixes, Sequence):
            raise TypeError(
                f"`balance` must have a list of names for each device, but for {device!r} it has "
                f"{prefixes!r}: write `[{prefixes!r}]`."
            )
        for prefix in prefixes:
            _check_known(prefix, names)
            if place_of.setdefault(prefix, places[device]) != places[device]:
                raise ValueError(
                    f"`balance` must name each layer once, but names `{prefix}` for two devices: "
                    f"leave one out."
                )
    return place_of


def _check_known(prefix: str, names: Sequence[str]) -> None:
    if any(is_within(name, prefix) for name in names):
        return
    whole = next((name for name in names if is_within(prefix, name)), None)
    if whole is not None:
        raise ValueError(
            f"`balance` must name what is computed apart, but `{prefix}` is a part of `{whole}`, "
            f"which is computed as one: name `{whole}`."
        )
    close = difflib.get_close_matches(str(prefix), names, n=1)
    instead = f"did you mean `{close[0]}`?" if close else f"there are {named(names)}."
    raise ValueError(
        f"`balance` must name layers with parameters or buffers, but the model has no {prefix!r}: "
        f"{instead}"
    )
