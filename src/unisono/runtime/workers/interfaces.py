"""At which address do other hosts reach this one? On the interface that the user named.

Without one, on the interface towards the rendezvous. Nothing listens on all interfaces.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from unisono.errors import RendezvousError

INTERFACE_VARIABLE = "UNISONO_INTERFACE"


def address_here(environ: Mapping[str, str] | None = None) -> str:
    """Return this host's address for other hosts, from the rendezvous in `environ`."""
    environ = os.environ if environ is None else environ
    where, port = environ.get("MASTER_ADDR", ""), int(environ.get("MASTER_PORT", "0") or 0)
    name, towards = environ.get(INTERFACE_VARIABLE), address_towards(where, port)
    address = _address_of(name) if name else towards
    if is_loopback(address) and not (name and is_loopback(towards)):
        raise RendezvousError(
            f"all hosts must reach this one, but {name or where} leads nowhere beyond it: pass "
            f"the address of rank 0's host on the network between them, or name the interface to "
            f"it with {INTERFACE_VARIABLE}."
        )
    return address


def interface_here() -> str:
    """Return the name of the interface with :func:`address_here`; raises as that does."""
    address, named = address_here(), os.environ.get(INTERFACE_VARIABLE)
    return named or next(name for name, there in _addresses().items() if address in there)


def is_loopback(address: str) -> bool:
    """Return whether only this host reaches an address."""
    return ipaddress.ip_address(address).is_loopback


def _address_of(name: str) -> str:
    """Return an interface's IPv4 address, or its IPv6 address if it has no other."""
    if there := _addresses().get(name):
        return there[0]
    raise RendezvousError(
        f"`{INTERFACE_VARIABLE}` must name an interface with an address, but is {name!r}: this "
        f"host has {', '.join(_addresses())}."
    )


def _addresses() -> dict[str, list[str]]:
    """Return each interface's addresses, IPv4 first, without link-local ones."""
    import psutil  # takes 15 ms, and one host does not need it

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [
            one.address
            for family in families
            for one in found
            if one.family == family and "%" not in one.address
        ]
        for name, found in psutil.net_if_addrs().items()
    }


def address_towards(where: str, port: int = 0) -> str:
    """Return the source address of packets to a host, without sending any."""
    try:
        found = socket.getaddrinfo(where, port or 1, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.connect(place)
            return str(asking.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"`MASTER_ADDR` must say where rank 0 is, reachable from every host, but {where!r} "
            f"cannot be reached ({error}): pass its host's name or address."
        ) from error
