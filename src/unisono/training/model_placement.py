"""Where a model is computed: on one device, or split over several."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.engine.splitting.device_transfers import device_transfers
from unisono.engine.splitting.split import split_of
from unisono.engine.state.contents import place
from unisono.runtime.device import AUTO, Device
from unisono.runtime.world import World
from unisono.training.options import RunOptions, check_together

Compute = Callable[[nn.Module, Any], Any]


def device_of_run(model: nn.Module, options: RunOptions, world: World) -> Device:
    """Return the device of a worker: where its model is split to, or what the options say."""
    split = split_of(model) if isinstance(model, nn.Module) else None
    if split is None:
        check_not_split_within(model)
        return Device.of(options.device, world)
    check_together(split=True, device=options.device != AUTO)
    return Device(*split.devices)


def check_not_split_within(model: Any) -> None:
    """Raise ValueError for a model of which only a part is split."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if split_of(module) is not None:
            raise ValueError(
                f"a model must be split as a whole, but only its part `{name}` is: call "
                f"`unisono.split` with the model that is trained."
            )


def check_split_before(model: nn.Module, device: Device) -> None:
    """Raise ValueError for a model that was split after its run was created on `device`."""
    split = split_of(model)
    there = {device.torch} if split is None else set(split.devices)
    if there != {part.torch for part in device.parts}:
        raise ValueError(
            f"a model must be split before its run or trainer is created, but was split later, "
            f"when it was to be computed on {device.name}: create the run after splitting it."
        )


def place_on(model: nn.Module, optimizer: Optimizer, device: Device) -> None:
    """Move a model, and its optimizer's state, to where it is computed."""
    split = split_of(model)
    if split is not None:
        split.place(model)
    if not device.is_host:
        place(model, optimizer, device)


def over_cuts(model: nn.Module, compute: Compute, *, to_first: bool = False) -> Compute:
    """Return a function that uses a split model's devices; its result may go to the first."""
    split = split_of(model)
    if split is None:
        return compute
    devices = split.devices

    @functools.wraps(compute)
    def follow(model: nn.Module, batch: Any) -> Any:
        with device_transfers(devices, batch) as under_way:
            found = compute(model, batch)
            return under_way.bring(found, devices[0] if to_first else None)

    return follow
