"""The two loops that are compared: Unisono's, and what somebody would write without it.

Both take the same samples. What a plain loop draws (dropout) comes from the run's own seeds, which
are set before each forward pass. Run in workers, too, so importable there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.gpu import cases
from tests.gpu.devices import be_ready, deterministic
from tests.parity.plain import take_steps
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import unisono

Weights = dict[str, Tensor]
Prepare = Callable[[Any], Any]


def trainer_of(
    case: str,
    device: str,
    shards: int,
    *,
    optimizer: str = "adamw",
    way: str = "usual",
    loss: Callable[[nn.Module, Any], Any] | None = None,
    prepare: Prepare = lambda thing: thing,
    **options: Any,
) -> unisono.Trainer:
    """Make the trainer of a case.

    Args:
        loss: another one than the case's.
        prepare: what is done to the model and to each tensor of a batch.
    """
    be_ready(device)
    model = cases.CASES[case].model(device)
    made = cases.OPTIMIZERS[optimizer].of(model.parameters(), way)
    usual = loss or cases.CASES[case].loss

    def prepared(model: nn.Module, batch: Any) -> Any:
        return usual(model, tree_map(prepare, batch))

    return unisono.Trainer(
        *(prepare(model), made, prepared),
        shards=shards,
        seed=cases.SEED,
        device=device,
        **options,
    )


def train(case: str, device: str, shards: int, steps: int, **options: Any) -> str:
    """Train a case in this process or worker; returns the digest."""
    trainer = trainer_of(case, device, shards, **options)
    trainer.fit(cases.CASES[case].data(), batch_size=cases.BATCH_SIZE, steps=steps)
    return trainer.digest()


def train_all(rows: list[tuple[str, dict[str, Any]]], device: str, shards: int) -> list[str]:
    """Train several, one after the other; `rows` are cases with options."""
    return [train(case, device, shards, **options) for case, options in rows]


def weights_of(model: nn.Module) -> Weights:
    """Copy parameters and buffers to the host."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def unisono_loop(case: str, device: str, steps: int, **options: Any) -> Weights:
    """Train with one shard; returns the weights."""
    trainer = trainer_of(case, device, 1, **options)
    trainer.fit(cases.CASES[case].data(), batch_size=cases.BATCH_SIZE, steps=steps)
    return weights_of(trainer.run.model)


def plain_loop(
    case: str,
    device: str,
    steps: int,
    *,
    optimizer: str = "adamw",
    way: str = "usual",
    prepare: Prepare = lambda thing: thing,
    **how: Any,
) -> Weights:
    """Train without Unisono, with deterministic settings; returns the weights.

    Args:
        case, device, steps, optimizer, way: as in :func:`trainer_of`.
        prepare: what is done to the model and to each tensor of a batch, on the device.
        how: as of :func:`tests.parity.plain.take_steps`.
    """
    be_ready(device)
    chosen = cases.CASES[case]
    model = chosen.model(device).to(device)
    getattr(model, "tie", lambda: None)()
    model = prepare(model)
    stepping = cases.OPTIMIZERS[optimizer].of(model.parameters(), way)
    how |= {"prepare": lambda part: prepare(part.to(device)), "batch_size": cases.BATCH_SIZE}
    with deterministic():
        take_steps(model, chosen.data(), chosen.loss, stepping, steps, **how)
    return weights_of(model)


def first_difference(ours: Weights, theirs: Weights) -> str | None:
    """Name the first tensor of which a bit differs, and by how much; None if all are equal."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if not torch.equal(ours[name], value):
            most = (ours[name].double() - value.double()).abs().max().item()
            return f"`{name}` differs by up to {most:.3g}"
    return None
