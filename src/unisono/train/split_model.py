"""A run whose model is split over several devices: which those are, and how passes go over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.device import AUTO, Device
from unisono.splitting.crossing import crossing
from unisono.splitting.cut import check_casts, split_of
from unisono.state.contents import place
from unisono.train.compiling import is_compiled
from unisono.train.computing import Computing
from unisono.train.run_options import RunOptions
from unisono.world import World

Compute = Callable[[nn.Module, Any], Any]


def device_of_run(model: nn.Module, options: RunOptions, world: World) -> Device:
    """Find where a worker computes: where its model is split to, or as the options say.

    Raises:
        TypeError, ValueError: see :meth:`Device.of`; or a part of the model is split, or a split
            model has a device given besides.
    """
    split = split_of(model) if isinstance(model, nn.Module) else None
    if split is None:
        check_not_split_within(model)
        return Device.of(options.device, world)
    if options.device != AUTO:
        raise ValueError(
            f"a split model is computed where it was split to, but `device={options.device!r}` is "
            f"given, too: leave it out, or split the model over other devices."
        )
    return Device(*split.devices)


def check_not_split_within(model: Any) -> None:
    """Refuse a model of which a part alone is split, with ValueError."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if split_of(module) is not None:
            raise ValueError(
                f"a model must be split as a whole, but only its part `{name}` is: call "
                f"`unisono.split` with the model that is trained."
            )


def check_computing(model: nn.Module, computing: Computing) -> None:
    """Refuse ways to compute passes that do not go with cuts.

    Raises:
        ValueError: the model is split, and is compiled, or rounding would depend on the cut.
    """
    if computing.precision != "fp32":
        check_casts(model)
    if split_of(model) is not None and is_compiled(model):
        raise ValueError(
            "a split model must not be compiled, as its activations go from device to device in "
            "Python: leave `model.compile()` out."
        )


def check_split_before(model: nn.Module, device: Device) -> None:
    """Refuse a model that was split since its run was made, on `device`, with ValueError."""
    split = split_of(model)
    there = {device.torch} if split is None else set(split.devices)
    if there != {part.torch for part in device.parts}:
        raise ValueError(
            f"a model must be split before its run or trainer is made, but was split after that, "
            f"when it was to be computed on {device.name}: make the run after."
        )


def place_on(model: nn.Module, optimizer: Optimizer, device: Device) -> None:
    """Have a model where it is to be computed, and the optimizer's state with it.

    Raises:
        ValueError: layers have come since it was split, or its parameters were replaced.
    """
    split = split_of(model)
    if split is not None:
        split.place(model)
    if not device.is_host:
        place(model, optimizer, device)


def over_cuts(model: nn.Module, compute: Compute, *, to_first: bool = False) -> Compute:
    """Have a loss or a forward function go over the devices of a split model.

    Args:
        model: the one that is trained; if it is not split, nothing changes.
        compute: what is to be computed: layers, and what is done with their outputs.
        to_first: whether what it returns comes to the first device.
    """
    split = split_of(model)
    if split is None:
        return compute
    devices = split.devices

    @functools.wraps(compute)
    def follow(model: nn.Module, batch: Any) -> Any:
        with crossing(devices, batch) as under_way:
            found = compute(model, batch)
            return under_way.bring(found, devices[0] if to_first else None)

    return follow
