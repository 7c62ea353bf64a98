"""May workers compute stages of a model here? What is not built yet is refused in words."""

from __future__ import annotations

from torch import nn

from unisono.device import Device
from unisono.exchange.choice import SHARED, name_of_exchange
from unisono.stages.cut import stages_of
from unisono.train.run_options import RunOptions
from unisono.workers.team import Team


def check_stages(
    team: Team,
    model: nn.Module,
    device: Device,
    options: RunOptions,
    num_devices: int,
) -> None:
    """Refuse what cannot be computed in stages.

    Args:
        team: the workers.
        model: which is to be cut.
        device: where this worker computes.
        options: what the program asks for.
        num_devices: on how many devices this worker computes.

    Raises:
        ValueError: something does not fit.
    """
    if team.num_stages == 1:
        return
    if len(team.hosts) > 1:
        raise ValueError(
            "`UNISONO_STAGES` must be 1 where workers are on several hosts, as the stages of a "
            "model share memory: unset it, or start all workers on one host."
        )
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
    if stages_of(model) is not None:
        raise ValueError(
            "a model must be whole where workers compute stages of it, but is cut by "
            "`unisono.split`: leave out one of `unisono.split` and `--stages`."
        )
    for name in ("audit_every", "on_gradients"):
        if getattr(options, name) is not None:
            raise ValueError(refusal_of(name))
    for name in ("closure", "carry"):
        if getattr(options, name):
            raise ValueError(refusal_of(name))
    name = name_of_exchange(options.exchange, device)
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


def refusal_of(name: str) -> str:
    """Say that an option does not go with stages."""
    return (
        f"`{name}` must be left out where workers compute stages of a model, but is given: leave "
        f"out one of `{name}` and `--stages`."
    )
