"""Does what is to be sent less between hosts go with the rest of a run? Said before a loop."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.device import Device
from unisono.exchange.choice import EXCHANGE_VARIABLE, HOSTS, SHARED
from unisono.exchange.slow_link import DiLoCo, SlowLink
from unisono.plan.groups import assign_groups, groups_of
from unisono.state.contents import updated_parameters
from unisono.state.optimizers import is_elementwise
from unisono.state.several_optimizers import kind_of, members_of
from unisono.train.run_context import RunContext
from unisono.train.run_options import RunOptions
from unisono.workers.team import Team


def link_among(team: Team, options: RunOptions, num_shards: int) -> SlowLink | None:
    """Give what the user has asked for, with its number of groups.

    Raises:
        ValueError: there is one group alone, or shards do not fit into groups.
    """
    link, num_hosts = options.slow_link, len(team.hosts)
    if link is None:
        return None
    if link.groups is None and num_hosts == 1:
        raise ValueError(
            f"`slow_link` must have a link between hosts, but all workers are on one: leave it "
            f"out, or pass `slow_link=unisono.{type(link).__name__}(groups=2)`, which computes "
            f"here what two hosts would."
        )
    link = link.among(link.groups or num_hosts)
    assert link.groups is not None
    assign_groups(groups_of(num_shards, link.groups), list(map(len, team.hosts)))
    return link


def check_run(
    link: SlowLink,
    options: RunOptions,
    model: nn.Module,
    optimizer: Optimizer,
    team: Team,
    device: Device,
    exchange: str,
) -> None:
    """Refuse what does not go with it.

    Raises:
        ValueError: something does not.
    """
    refused = {
        "audit_every": options.audit_every is not None,
        "closure": options.takes_closure(optimizer),
        "devices": options.devices is not None,
        "grad_scaler": options.grad_scaler is not None,  # what overflows would stay in residuals
        "on_gradients": options.on_gradients is not None,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ValueError(
                f"`{name}` must be left out where `slow_link` is given, but is there: leave one "
                f"of them out."
            )
    if device.is_host and exchange not in (SHARED, HOSTS):
        raise ValueError(
            f"workers of a host must share memory where `slow_link` is given, but exchange is "
            f"{exchange!r}: leave out `exchange` and {EXCHANGE_VARIABLE}, or `slow_link`."
        )
    if not device.is_host:
        raise ValueError(
            f"workers must compute on the CPU where `slow_link` is given, but this one computes "
            f'on {device.name}: pass `device="cpu"`, or leave `slow_link` out.'
        )
    if len(members_of(optimizer)) > 1:
        raise ValueError(
            "a run must have one optimizer where `slow_link` is given, but has several: leave "
            "`slow_link` out, or make one optimizer with several groups."
        )
    if isinstance(link, DiLoCo) and not is_elementwise(optimizer):
        raise ValueError(
            f"groups that take steps of their own must have an element-wise optimizer of torch's, "
            f"without hooks, such as AdamW, but have {kind_of(optimizer)}: take one, or "
            f"`slow_link=unisono.Bf16Gradients()`."
        )
    for name, parameter in updated_parameters(model, optimizer).items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameters must be float32 where `slow_link` is given, but `{name}` is "
                f"{parameter.dtype}: leave `slow_link` out."
            )


def tell_unfinished_round(run: RunContext) -> None:
    """Say at a loop's end how many steps the model does not have yet."""
    link, step = run.options.slow_link, run.kept.position.step
    if isinstance(link, DiLoCo) and step % link.local_steps and run.team.position == 0:
        run.say(
            f"steps from {step - step % link.local_steps} on are not in the model yet, as groups "
            f"agree on an outer step after every {link.local_steps}: let `steps` be a multiple of "
            f"it"
        )
