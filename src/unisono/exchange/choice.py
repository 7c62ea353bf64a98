"""Choose the exchange of a run; results do not depend on it."""

from __future__ import annotations

import os

from unisono.exchange.group_exchange import GroupExchange
from unisono.exchange.protocol import Exchange
from unisono.exchange.shared import SharedExchange
from unisono.exchange.staged import StagedExchange

EXCHANGE_VARIABLE = "UNISONO_EXCHANGE"
_EXCHANGES: dict[str, type[Exchange]] = {
    "shared": SharedExchange,
    "staged": StagedExchange,
    "group": GroupExchange,
}


def chosen() -> type[Exchange]:
    """Find the exchange that the environment names; workers share their memory if it names none.

    Raises:
        ValueError: there is no such exchange.
    """
    name = os.environ.get(EXCHANGE_VARIABLE, "shared")
    if name not in _EXCHANGES:
        raise ValueError(
            f"{EXCHANGE_VARIABLE} must be one of {tuple(_EXCHANGES)}, but is {name!r}."
        )
    return _EXCHANGES[name]
