"""Choose the exchange of a run; results do not depend on it."""

from __future__ import annotations

import os

from torch import distributed

from unisono.engine.exchange.protocol import Exchange
from unisono.engine.exchange.shared import SharedExchange
from unisono.engine.exchange.staged import StagedExchange
from unisono.runtime.device import Device
from unisono.runtime.workers.team import Team

EXCHANGE_VARIABLE = "UNISONO_EXCHANGE"
AUTO, SHARED, STAGED, NCCL, GLOO = EXCHANGES = ("auto", "shared", "staged", "nccl", "gloo")
# Nobody asks for these: they are used where there are several hosts.
HOSTS, STAGED_HOSTS = "hosts", "staged hosts"
_ON_HOSTS = {SHARED: HOSTS, STAGED: STAGED_HOSTS}


def check_exchange(name: str) -> None:
    """Refuse what is the name of no exchange, with ValueError."""
    if name not in EXCHANGES:
        raise ValueError(f"`exchange` must be one of {EXCHANGES}, but is {name!r}.")


def name_of_exchange(
    name: str, device: Device, *, replicas_for: str = "", num_hosts: int = 1
) -> str:
    """Find the exchange of a worker.

    Args:
        name: what the program asks for; ``"auto"``: what the environment names, or else the
            exchange that is used most on such devices.
        device: where the worker computes.
        replicas_for: the option for which each worker must have a replica; empty: none.
        num_hosts: how many hosts the workers are on.

    Raises:
        ValueError: there is no such exchange, or not for this device or that option.
    """
    said = f'`exchange="{name}"`'
    if name == AUTO:
        name = os.environ.get(EXCHANGE_VARIABLE, AUTO)
        if name not in EXCHANGES:
            raise ValueError(f"{EXCHANGE_VARIABLE} must be one of {EXCHANGES}, but is {name!r}.")
        said = f"{EXCHANGE_VARIABLE}={name}"
    if name == AUTO:
        name = SHARED if device.is_host and not replicas_for else STAGED
    if num_hosts > 1 and name not in _ON_HOSTS:
        raise ValueError(
            f"{said} is for workers of one host, but they are on several: leave it out, or pass "
            f'`exchange="staged"`; workers share memory on each host, and exchange sums over the '
            f"network."
        )
    _check_fits(name, said, device, replicas_for)
    return name if num_hosts == 1 else _ON_HOSTS[name]


def _check_fits(name: str, said: str, device: Device, replicas_for: str) -> None:
    """Refuse an exchange that is not for a worker's device, or not for what it is asked for."""
    if name == SHARED and replicas_for:
        raise ValueError(
            f"{said} has one copy of the parameters for all workers, but `{replicas_for}` needs "
            f'one for each: leave it out, or pass `exchange="staged"`.'
        )
    if device.is_host and name == NCCL:
        raise ValueError(
            f"{said} must have a GPU for each worker, but this one computes on the CPU: leave it "
            f'out, or pass `exchange="gloo"`.'
        )
    if not device.is_host and name in (SHARED, GLOO):
        raise ValueError(
            f"{said} must have gradients in the host's memory, but this worker computes on "
            f'{device.name}: leave it out, or pass `exchange="staged"`.'
        )
    if name == NCCL and device.is_divided:
        raise ValueError(
            f"{said} must have one GPU for each worker, but this one has a split model on "
            f'{device.name}: leave it out, or pass `exchange="staged"`.'
        )
    if name == NCCL and not distributed.is_nccl_available():
        raise ValueError(
            f"{said} must have a torch that is built with NCCL, but this one is not: leave it "
            f'out, or pass `exchange="staged"`.'
        )


def check_devices(name: str, device: Device, team: Team) -> None:
    """See that no two workers share a GPU where NCCL is to connect them. Collective.

    Raises:
        ValueError: two do; on every worker.
    """
    if name != NCCL or team.size == 1:
        return
    seen: dict[bytes, int] = {}
    for rank, identity in team.gather(device.identity.encode(), "choice of exchange").items():
        if identity in seen:
            raise ValueError(
                f'`exchange="nccl"` must have a GPU for each worker, but ranks {seen[identity]} '
                f"and {rank} share one: start fewer workers, with `--workers-per-gpu 1`, or pass "
                f'`exchange="staged"`.'
            )
        seen[identity] = rank


def chosen(name: str, device: Device) -> type[Exchange]:
    """Find the exchange of a worker's loops; arguments and errors as :func:`name_of_exchange`."""
    name = name if name in _ON_HOSTS.values() else name_of_exchange(name, device)
    if name in (GLOO, NCCL):
        # It needs a torch that has such process groups; the others do not.
        from unisono.engine.exchange.group_exchange import GroupExchange

        return GroupExchange
    if name == HOSTS:
        from unisono.engine.exchange.hosts_exchange import HostsExchange

        return HostsExchange
    if name == STAGED_HOSTS:
        from unisono.engine.exchange.hosts_exchange import StagedHostsExchange

        return StagedHostsExchange
    return StagedExchange if name == STAGED else SharedExchange
