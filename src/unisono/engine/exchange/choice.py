"""Choose the exchange of a run; results do not depend on it."""

from __future__ import annotations

import os

from torch import distributed
from torch.optim import Optimizer

from unisono.engine.exchange.protocol import Exchange
from unisono.engine.exchange.shared import SharedExchange
from unisono.engine.exchange.staged import StagedExchange
from unisono.engine.state.optimizers import is_elementwise
from unisono.runtime.device import Device
from unisono.runtime.workers.team import Team

EXCHANGE_VARIABLE = "UNISONO_EXCHANGE"
AUTO, SHARED, STAGED, NCCL, GLOO = _REPLICATED = ("auto", "shared", "staged", "nccl", "gloo")
ZERO = "zero"
# Nobody asks for these: they are used where there are several hosts.
HOSTS, STAGED_HOSTS, ZERO_HOSTS = "hosts", "staged hosts", "zero hosts"
# As these, but each worker keeps the optimizer state of its pieces alone.
_SHARDED = {ZERO: STAGED, "gloo-zero": GLOO, "nccl-zero": NCCL, ZERO_HOSTS: STAGED_HOSTS}
EXCHANGES = (*_REPLICATED, ZERO, "gloo-zero", "nccl-zero")
_ON_HOSTS = {
    SHARED: HOSTS,
    STAGED: STAGED_HOSTS,
    GLOO: "gloo hosts",
    NCCL: "nccl hosts",
    ZERO: ZERO_HOSTS,
}
_OTHERWISE = f"leave it out, or set {EXCHANGE_VARIABLE}={STAGED}"


def name_of_exchange(device: Device, *, replicas_for: str = "", num_hosts: int = 1) -> str:
    """Find the exchange of a worker: what the environment names, or what is usual on its device.

    Args:
        device: where the worker computes.
        replicas_for: for what each worker must have a replica; empty: nothing.
        num_hosts: how many hosts the workers are on.

    Raises:
        ValueError: there is no such exchange, or not for this device or that option.
    """
    name = os.environ.get(EXCHANGE_VARIABLE, AUTO)
    if name not in EXCHANGES:
        raise ValueError(f"{EXCHANGE_VARIABLE} must be one of {EXCHANGES}, but is {name!r}.")
    if name == AUTO:
        name = SHARED if device.is_host and not replicas_for else STAGED
    said = f"{EXCHANGE_VARIABLE}={name}"
    _check_fits(_SHARDED.get(name, name), said, device, replicas_for)
    if num_hosts > 1 and name not in _ON_HOSTS:
        raise ValueError(
            f"{said} must have all workers on one host, but they are on {num_hosts}: set "
            f"{EXCHANGE_VARIABLE}=zero, which divides the state among the workers of each host."
        )
    return name if num_hosts == 1 else _ON_HOSTS[name]


def _check_fits(name: str, said: str, device: Device, replicas_for: str) -> None:
    """Refuse an exchange that is not for a worker's device, or not for what it is asked for."""
    if name == SHARED and replicas_for:
        raise ValueError(
            f"{said} has one copy of the parameters for all workers, but {replicas_for} needs "
            f"one for each: {_OTHERWISE}."
        )
    if device.is_host and name == NCCL:
        raise ValueError(
            f"{said} must have a GPU for each worker, but this one computes on the CPU: leave it "
            f"out, or set {EXCHANGE_VARIABLE}={GLOO}."
        )
    if not device.is_host and name in (SHARED, GLOO):
        raise ValueError(
            f"{said} must have gradients in the host's memory, but this worker computes on "
            f"{device.name}: {_OTHERWISE}."
        )
    if name == NCCL and device.is_divided:
        raise ValueError(
            f"{said} must have one GPU for each worker, but this one has a split model on "
            f"{device.name}: {_OTHERWISE}."
        )
    if name == NCCL and not distributed.is_nccl_available():
        raise ValueError(
            f"{said} must have a torch that is built with NCCL, but this one is not: {_OTHERWISE}."
        )


def divides_state(name: str) -> bool:
    """Tell whether an exchange is to divide the optimizer's state among workers."""
    return name in _SHARDED


def check_devices(name: str, device: Device, team: Team) -> None:
    """See that no two workers share a GPU where NCCL is to connect them. Collective.

    Raises:
        ValueError: two do; on every worker.
    """
    if NCCL not in name or team.size == 1:
        return
    seen: dict[bytes, int] = {}
    for rank, identity in team.gather(device.identity.encode(), "choice of exchange").items():
        if identity in seen:
            raise ValueError(
                f"{EXCHANGE_VARIABLE}={NCCL} must have a GPU for each worker, but ranks "
                f"{seen[identity]} and {rank} share one: start fewer workers, with "
                f"`--workers-per-gpu 1`, or {_OTHERWISE}."
            )
        seen[identity] = rank


def chosen(name: str, optimizer: Optimizer) -> type[Exchange]:
    """Find an exchange by what :func:`name_of_exchange` has given.

    Where an optimizer looks at whole parameters, each worker has its whole state.
    """
    if name in _SHARDED:
        return _sharded(name) if is_elementwise(optimizer) else chosen(_SHARDED[name], optimizer)
    if name in (GLOO, NCCL):
        # It needs a torch that has such process groups; the others do not.
        from unisono.engine.exchange.group_exchange import GroupExchange

        return GroupExchange
    if name in _ON_HOSTS.values():
        from unisono.engine.exchange import hosts_exchange as between

        classes = {HOSTS: between.HostsExchange, STAGED_HOSTS: between.StagedHostsExchange}
        return classes.get(name, between.GroupHostsExchange)
    return StagedExchange if name == STAGED else SharedExchange


def _sharded(name: str) -> type[Exchange]:
    from unisono.engine.exchange import sharded_exchanges as sharded

    classes: dict[str, type[Exchange]] = {
        ZERO: sharded.ShardedStagedExchange,
        ZERO_HOSTS: sharded.ShardedStagedHostsExchange,
    }
    return classes.get(name, sharded.ShardedGroupExchange)
