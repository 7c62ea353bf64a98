"""Choose the exchange of a run; results do not depend on it."""

from __future__ import annotations

import os

from unisono.device import Device
from unisono.exchange.protocol import Exchange
from unisono.exchange.shared import SharedExchange
from unisono.exchange.staged import StagedExchange

EXCHANGE_VARIABLE = "UNISONO_EXCHANGE"
_NAMES = ("shared", "staged", "group")


def chosen(device: Device) -> type[Exchange]:
    """Find the exchange that the environment names, or else the one for a worker's device.

    Raises:
        ValueError: there is no such exchange, or not for this device.
    """
    name = os.environ.get(EXCHANGE_VARIABLE, "shared" if device.is_host else "staged")
    if name not in _NAMES:
        raise ValueError(f"{EXCHANGE_VARIABLE} must be one of {_NAMES}, but is {name!r}.")
    if name != "staged" and not device.is_host:
        raise ValueError(
            f"{EXCHANGE_VARIABLE} must be 'staged' on {device.name}, but is {name!r}: unset it."
        )
    if name == "group":
        # Needs a torch that has gloo; the others do not.
        from unisono.exchange.group_exchange import GroupExchange

        return GroupExchange
    return StagedExchange if name == "staged" else SharedExchange
