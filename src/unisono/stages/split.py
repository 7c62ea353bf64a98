"""``unisono.split``: put consecutive parts of a model on several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from unisono.device import HOST, count_of
from unisono.stages.balance import assigned, divide
from unisono.stages.cut import Stages, cut, join
from unisono.stages.units import Unit, units_of
from unisono.state.contents import check_unwrapped

BALANCES = ("memory", "time")
Devices = Sequence["str | torch.device"]
Balance = str | Mapping[Any, Sequence[str]]


def split(
    model: nn.Module,
    devices: Devices,
    balance: Balance = "memory",
) -> nn.Module:
    """Put consecutive parts of a model on several devices of this process, in place.

    For models that do not fit on one device. Parameters stay the objects that they are; names,
    state dicts and digests stay, so checkpoints of a run with a split model may be loaded without,
    and the other way round. Activations go from device to device where they are needed, and
    dropout draws what it draws on one device: results have the same bits. There is no overlap: one
    device computes at a time.

    The model takes its inputs on the first device and gives its outputs where the last operation
    was. Pass it to :class:`unisono.Trainer` or :class:`unisono.Run` without `device`. In a loop of
    your own, bring the targets there (``targets.to(outputs.device)``), and call ``backward`` within
    ``torch.autograd.set_multithreading_enabled(False)``: with a thread for each device, autograd
    adds up gradients in the order in which they come.

    Args:
        model: the whole model, before or after its optimizer is made. Layers that only move data
            or have no parameters are computed where their inputs are. A parameter that several
            layers have is with the first of them, and is copied where another one needs it.
        devices: torch's names, in order, such as ``["cuda:0", "cuda:1"]``; of one type. One device
            puts a model together again.
        balance: ``"memory"``: the fullest device has as little as possible, counted in bytes of
            parameters, gradients and two more copies for an optimizer such as Adam. Or a dict:
            by device (or its number in `devices`) names of layers, or of what several are within,
            in any order; a longer name counts before a shorter one.

    Returns:
        The model.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a device is not there, the model has fewer parts than there are devices, a layer
            is named on no device, or it is compiled, TorchScript, wrapped or without shapes.
    """
    there = _read_devices(devices)
    check_can_be_cut(model)
    join(model)
    units = units_of(model)
    stage_of = _assign(units, there, balance)
    cut(model, Stages(there, {unit.name: at for unit, at in zip(units, stage_of, strict=True)}))
    return model


def check_can_be_cut(model: nn.Module) -> None:
    """Refuse what is no model that can be cut.

    Raises:
        TypeError: it is no module.
        ValueError: it is wrapped, compiled, or not initialised.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` must be a torch.nn.Module, but is of type {type(model).__name__}."
        )
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


def _read_devices(devices: Devices) -> tuple[torch.device, ...]:
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(
            f"`devices` must be a list of devices, but is {devices!r}: pass "
            f'`["cuda:0", "cuda:1"]`, say.'
        )
    found = tuple(map(_read_device, devices))
    if not found:
        raise ValueError('`devices` must name at least one device, but is empty: pass `["cpu"]`.')
    kinds = sorted({device.type for device in found})
    if len(kinds) > 1:
        raise ValueError(
            f"`devices` must be of one type, since random numbers and rounding differ between "
            f"types, but are of {' and '.join(kinds)}: name devices of one of them."
        )
    return found


def _read_device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f'`devices` must name devices of torch, such as "cuda:1", but has {name!r}.'
        ) from error
    count = count_of(device.type)
    if count == 0:
        raise ValueError(
            f"`devices` must be there, but torch finds no {device.type!r} device on this machine."
        )
    if device.type == HOST:
        return torch.device(HOST)
    if device.index is None or device.index >= count:
        raise ValueError(
            f"`devices` must name devices by their numbers, from {device.type}:0 to "
            f"{device.type}:{count - 1}, but has {str(device)!r}."
        )
    return device


def _assign(
    units: Sequence[Unit], devices: Sequence[torch.device], balance: Balance
) -> Sequence[int]:
    names = [unit.name for unit in units]
    if isinstance(balance, Mapping):
        stages: dict[Any, int] = {}
        for at, device in enumerate(devices):
            stages[at] = at
            stages.setdefault(str(device), at)
        read = {_key(device): named for device, named in balance.items()}
        return assigned(read, stages, names, [bool(unit.parameters) for unit in units])
    if balance == "memory":
        return divide([unit.num_bytes for unit in units], names, len(devices))
    raise ValueError(f"`balance` must be one of {BALANCES} or names by device, but is {balance!r}.")


def _key(device: Any) -> Any:
    return device if isinstance(device, int) else str(device)
