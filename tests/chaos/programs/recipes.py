"""The optimizers and schedules of random programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.chaos.programs.choices import Choices
from tests.parity.cases import SignOfMean
from torch import nn, optim
from torch.optim import lr_scheduler

KINDS: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.05, "weight_decay": 0.01}),
    "momentum": (optim.SGD, {"lr": 0.03, "momentum": 0.9}),
    "nesterov": (optim.SGD, {"lr": 0.03, "momentum": 0.9, "nesterov": True}),
    "fused momentum": (optim.SGD, {"lr": 0.03, "momentum": 0.9, "fused": True}),
    "foreach momentum": (optim.SGD, {"lr": 0.03, "momentum": 0.9, "foreach": True}),
    "adam": (optim.Adam, {"lr": 1e-2}),
    "fused adam": (optim.Adam, {"lr": 1e-2, "fused": True}),
    "foreach adam": (optim.Adam, {"lr": 1e-2, "foreach": True}),
    "amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adamw": (optim.AdamW, {"lr": 1e-2}),
    "fused adamw": (optim.AdamW, {"lr": 1e-2, "fused": True}),
    "rmsprop": (optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.03}),
    "fused adagrad": (optim.Adagrad, {"lr": 0.03, "fused": True}),
    "adadelta": (optim.Adadelta, {}),
    "adamax": (optim.Adamax, {}),
    # Groups of tensors, which torch takes on devices, are rounded otherwise in these three.
    "asgd": (optim.ASGD, {"lr": 0.03, "foreach": False}),
    "nadam": (optim.NAdam, {"lr": 1e-2, "foreach": False}),
    "radam": (optim.RAdam, {"lr": 1e-2, "foreach": False}),
    "rprop": (optim.Rprop, {"lr": 1e-3}),
    "adafactor": (optim.Adafactor, {"lr": 1e-2}),
    "muon": (optim.Muon, {"lr": 1e-3}),
    "own": (SignOfMean, {}),
    "clipped in a hook": (optim.Adam, {"lr": 1e-2}),
}


def optimizer_of(choices: Choices, model: nn.Module) -> optim.Optimizer:
    """Make the optimizer, over one or two groups."""
    make, options = KINDS[choices.optimizer]
    parameters = list(model.parameters())
    if choices.optimizer == "muon":
        parameters = [p for p in parameters if p.ndim == 2]
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if choices.num_groups == 2:
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim <= 1]
        # Smaller by a power of two, as a schedule of each group's own may want it.
        groups = [{"params": matrices}, {"params": vectors, "lr": options.get("lr", 1e-2) / 2}]
    optimizer = make([group for group in groups if group["params"]], **options)
    if choices.optimizer == "clipped in a hook":

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(parameters, 0.5)

        optimizer.register_step_pre_hook(clip)
    return optimizer


def schedule_of(choices: Choices, optimizer: optim.Optimizer) -> Any:
    """Make the schedule; None: rates stay."""
    num_times = choices.num_steps if choices.schedule_every == "step" else choices.epochs
    rate = [group["lr"] for group in optimizer.param_groups]
    made: dict[str, Callable[[Any], Any]] = {
        "steps": functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.7),
        "exponential": functools.partial(lr_scheduler.ExponentialLR, gamma=0.9),
        "cosine": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=num_times),
        "one cycle": functools.partial(
            lr_scheduler.OneCycleLR, max_lr=rate, total_steps=num_times, cycle_momentum=False
        ),
        "warm restarts": functools.partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
        "lambda": functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 1.0 / (1 + 0.1 * n)),
        "cyclic momentum": functools.partial(
            lr_scheduler.CyclicLR, base_lr=[r / 4 for r in rate], max_lr=rate, step_size_up=3
        ),
        "plateau": functools.partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0),
        "chained": lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.2, total_iters=3),
                lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            milestones=[3],
        ),
    }
    return made[choices.schedule](optimizer) if choices.schedule != "none" else None
