"""The two loops that are compared: Unisono's, and what somebody would write without it.

Both take the same samples. What a plain loop draws (dropout) comes from the run's own seeds, which
are set before each forward pass. Run in workers, too, so importable there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from tests.gpu import cases
from tests.gpu.devices import be_ready, deterministic
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DistributedSampler

import unisono
from unisono.plan.seeds import seed_of

Weights = dict[str, Tensor]
Prepare = Callable[[Any], Any]


def made(case: str, optimizer: str, way: str, device: str) -> tuple[nn.Module, Any]:
    """Make a model on the CPU and its optimizer, as programs do."""
    model = cases.CASES[case].model(device)
    return model, cases.OPTIMIZERS[optimizer].of(model.parameters(), way)


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
    model, made_optimizer = made(case, optimizer, way, device)
    usual = loss or cases.CASES[case].loss

    def prepared(model: nn.Module, batch: Any) -> Any:
        return usual(model, tree_map(prepare, batch))

    return unisono.Trainer(
        *(prepare(model), made_optimizer, prepared),
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


def usual_update(loss: Tensor, model: nn.Module, optimizer: Any) -> None:
    """Do what follows the forward pass where nothing else is said."""
    loss.backward()
    optimizer.step()


def plain_loop(
    case: str,
    device: str,
    steps: int,
    *,
    optimizer: str = "adamw",
    way: str = "usual",
    prepare: Prepare = lambda thing: thing,
    around: Callable[[], Any] = contextlib.nullcontext,
    update: Callable[[Tensor, Any, Any], None] = usual_update,
) -> Weights:
    """Train without Unisono, with deterministic settings; returns the weights.

    Args:
        case, device, steps, optimizer, way: as in :func:`trainer_of`.
        prepare: what is done to the model and to each tensor of a batch, on the device.
        around: what the forward pass is computed within.
        update: takes (loss, model, optimizer) to the next parameters.
    """
    be_ready(device)
    chosen = cases.CASES[case]
    model = chosen.model(device).to(device)
    getattr(model, "tie", lambda: None)()
    model = prepare(model)
    stepping = cases.OPTIMIZERS[optimizer].of(model.parameters(), way)
    data = chosen.data()
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=1, rank=0, seed=cases.SEED
    )
    model.train()
    with deterministic():
        for step in range(steps):
            epoch, place = divmod(step, cases.STEPS_PER_EPOCH)
            sampler.set_epoch(epoch)
            start = place * cases.BATCH_SIZE
            batch = data[list(sampler)[start : start + cases.BATCH_SIZE]]
            on_device = [prepare(part.to(device)) for part in batch]
            torch.manual_seed(seed_of("train", cases.SEED, step))
            stepping.zero_grad()
            with around():
                loss = mean_of(chosen.loss(model, on_device))
            update(loss, model, stepping)
    return weights_of(model)


def mean_of(returned: Any) -> Tensor:
    """Take the mean loss out of what a loss function returns."""
    return returned["loss"] if isinstance(returned, dict) else returned


def first_difference(ours: Weights, theirs: Weights) -> str | None:
    """Name the first tensor of which a bit differs, and by how much; None if all are equal."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if not torch.equal(ours[name], value):
            most = (ours[name].double() - value.double()).abs().max().item()
            return f"`{name}` differs by up to {most:.3g}"
    return None
