"""May workers compute stages of a model here? What is not built yet is refused in words."""

from __future__ import annotations

from torch import nn

from unisono.device import Device
from unisono.exchange.choice import SHARED, name_of_exchange
from unisono.workers.team import Team


def check_stages(
    team: Team,
    model: nn.Module,
    device: Device,
    exchange: str,
    num_devices: int,
    audit_every: int | None,
) -> None:
    """Refuse what cannot be computed in stages.

    Args:
        team: the workers.
        model: which is to be cut.
        device: where this worker computes.
        exchange: what the program asks for.
        num_devices: on how many devices this worker computes.
        audit_every: whether parts are computed again by other workers.

    Raises:
        ValueError: something does not fit.
    """
    if team.num_stages == 1:
        return
    if not device.is_host:
        raise ValueError(
            f"`device` must be the CPU where workers compute stages of a model, but is "
            f'{device.name}: pass `device="cpu"`, or leave `--stages` out and cut the model over '
            f"the devices of one worker with `unisono.split`."
        )
    if num_devices > 1:
        raise ValueError(
            f"`devices` must be left out where workers compute stages of a model, but names "
            f"{num_devices}: leave out one of `devices` and `--stages`."
        )
    if audit_every is not None:
        raise ValueError(
            f"`audit_every` must be left out where workers compute stages of a model, but is "
            f"{audit_every}: leave out one of `audit_every` and `--stages`."
        )
    name = name_of_exchange(exchange, device)
    if name != SHARED:
        raise ValueError(
            f'`exchange` must be "shared" where workers compute stages of a model, but is '
            f"{name!r}: leave it out, and UNISONO_EXCHANGE unset."
        )
    for path, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"a model must be run by Python where workers compute stages of it, but "
                f"`{path or 'model'}` is compiled: leave `compile` out."
            )
