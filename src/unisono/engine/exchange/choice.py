"""Choose the exchange of a run; results do not depend on it."""

from __future__ import annotations

import os

from torch import distributed
from torch.optim import Optimizer

from unisono.engine.exchange.exchange import ExchangeKind
from unisono.engine.exchange.host_memory import HostMemoryCarriage
from unisono.engine.exchange.owned_pieces import OwnedPieces
from unisono.engine.exchange.ownership import Ownership
from unisono.engine.exchange.replicas import Replicas
from unisono.engine.exchange.shared_copy import SharedCopy
from unisono.engine.state.optimizers import is_elementwise
from unisono.runtime.device import Device
from unisono.runtime.workers.team import Team

EXCHANGE_VARIABLE = "UNISONO_EXCHANGE"
EXCHANGES = ("auto", "shared", "staged", "nccl", "gloo", "zero")
AUTO, SHARED, STAGED, NCCL, GLOO, ZERO = EXCHANGES
_OTHERWISE = f"leave it out, or set {EXCHANGE_VARIABLE}={STAGED}"


def name_of_exchange(device: Device, *, replicas_for: str = "") -> str:
    """Return the exchange named by the environment, or the default for a worker's device.

    The default on the CPU depends on the optimizer: see :func:`chosen`.

    Args:
        replicas_for: what requires a replica on each worker; empty if nothing does.
    """
    name = os.environ.get(EXCHANGE_VARIABLE, AUTO)
    if name not in EXCHANGES:
        raise ValueError(f"{EXCHANGE_VARIABLE} must be one of {EXCHANGES}, but is {name!r}.")
    if name == AUTO and (replicas_for or not device.is_host):
        name = STAGED
    _check_fits(name, device, replicas_for)
    return name


def _check_fits(name: str, device: Device, replicas_for: str) -> None:
    said = f"{EXCHANGE_VARIABLE}={name}"
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
    """Return whether an exchange divides the optimizer's state among workers."""
    return name == ZERO


def check_devices(name: str, device: Device, team: Team) -> None:
    """Raise ValueError if two workers share a GPU and use NCCL. Collective."""
    if name != NCCL or team.size == 1:
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


def chosen(name: str, optimizer: Optimizer) -> ExchangeKind:
    """Return the parts of an exchange, given the name from :func:`name_of_exchange`.

    If the optimizer needs whole parameters, each worker has its whole state, since a program may
    read it between steps; unless the environment selects the exchange with one copy for all.
    """
    if name in (AUTO, ZERO) and not is_elementwise(optimizer):
        name = STAGED
    elif name == AUTO:
        name = SHARED
    if name in (NCCL, GLOO):
        from unisono.engine.exchange.group_carriage import GroupCarriage  # needs process groups

        return ExchangeKind(GroupCarriage, Replicas)
    owners: dict[str, type[Ownership]]
    owners = {SHARED: SharedCopy, STAGED: Replicas, ZERO: OwnedPieces}
    return ExchangeKind(HostMemoryCarriage, owners[name])
