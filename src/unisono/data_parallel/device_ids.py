"""Which devices do `device_ids` and `output_device` mean? As in torch's DataParallel."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Name = int | str | torch.device
_HOST = torch.device("cpu")
_WITHOUT_NUMBERS = "mps"  # one device; torch's DataParallel leaves it alone, too


def read_devices(device_ids: Iterable[Name] | Name | None) -> tuple[torch.device, ...]:
    """Find the devices of a DataParallel.

    Args:
        device_ids: numbers of the machine's kind of accelerator, or torch's names of devices; one
            may be there several times. None: all accelerators.

    Returns:
        Each with its number; none if there is no accelerator and none was asked for.

    Raises:
        TypeError: it is no list, or something in it names no device.
        ValueError: a device is not there, or they are of several types.
    """
    if device_ids is None:
        kind = accelerator()
        count = 0 if kind is None else torch.accelerator.device_count()
        return tuple(torch.device(str(kind), index) for index in range(count))
    if isinstance(device_ids, (int, str, torch.device)):
        raise TypeError(
            f"`device_ids` must be a list of devices, but is {device_ids!r}: pass [{device_ids!r}]."
        )
    devices = tuple(read_device("device_ids", name) for name in device_ids)
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1:
        raise ValueError(
            f"`device_ids` must be devices of one type, but are of {' and '.join(kinds)} "
            f"({', '.join(map(str, devices))}): their results differ in the last bits, so pass "
            f"those of one type."
        )
    return devices


def read_device(argument: str, name: Name) -> torch.device:
    """Find one device, with its number.

    Args:
        argument: what the caller calls it, for messages.
        name: a number of the machine's kind of accelerator (-1: the CPU), or torch's name.

    Raises:
        TypeError: it names no device.
        ValueError: it is not there.
    """
    if isinstance(name, int) and not isinstance(name, bool):
        if name == -1:
            return _HOST
        kind = accelerator()
        if kind is None:
            raise ValueError(
                f"`{argument}` must name devices that are there, but has {name}, and torch finds "
                f'no accelerator on this machine: pass `["cpu", "cpu"]` to compute on the CPU, or '
                f"None."
            )
        return _there(argument, torch.device(kind, name))
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f'`{argument}` must have numbers or names of devices, such as 0 or "cuda:0", but has '
            f"{name!r}."
        ) from error
    if device.type == _HOST.type:
        return _HOST
    if str(device) == accelerator():  # without a number
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return _there(argument, device)


def accelerator() -> str | None:
    """Give the type of this machine's accelerators; None if there are none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == _WITHOUT_NUMBERS else found.type


def _there(argument: str, device: torch.device) -> torch.device:
    count = torch.accelerator.device_count() if device.type == accelerator() else 0
    if not 0 <= (device.index or 0) < count:
        kind = device.type if not count else f"{device.type} device"
        raise ValueError(
            f"`{argument}` must name devices that are there, but has {device}, and torch finds "
            f"{count or 'no'} {kind}{'s' if count > 1 else ''} on this machine: pass others, or "
            f"None for all."
        )
    return device
