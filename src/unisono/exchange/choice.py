"""Choose the exchange of a run; results do not depend on it."""

from __future__ import annotations

import os

from unisono.exchange.protocol import Exchange
from unisono.exchange.shared import SharedExchange
from unisono.exchange.staged import StagedExchange

EXCHANGE_VARIABLE = "UNISONO_EXCHANGE"
_NAMES = ("shared", "staged", "group")


def chosen() -> type[Exchange]:
    """Find the exchange that the environment names; workers share their memory if it names none.

    Raises:
        ValueError: there is no such exchange.
    """
    name = os.environ.get(EXCHANGE_VARIABLE, "shared")
    if name not in _NAMES:
        raise ValueError(f"{EXCHANGE_VARIABLE} must be one of {_NAMES}, but is {name!r}.")
    if name == "group":
        # Needs a torch that has gloo; the others do not.
        from unisono.exchange.group_exchange import GroupExchange

        return GroupExchange
    return StagedExchange if name == "staged" else SharedExchange
