"""What somebody would write without us: a plain torch loop, with the lines that recipes change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from tests.parity import cases
from torch.utils.data import DistributedSampler

import unisono


def mean_of(loss: Callable[..., Any], model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Compute a loss of any form, and the mean that somebody without us would differentiate."""
    value = loss(model, batch)
    value = value["loss"] if isinstance(value, dict) else value
    return value if not isinstance(value, tuple) else value[0] / value[1]


def made(model_name: str, optimizer_name: str) -> tuple[Any, Any, Any, Any]:
    """Make a case: its model, data, loss and optimizer."""
    make_model, make_data, loss = (cases.MODELS | cases.OTHER_MODELS)[model_name]
    torch.manual_seed(11)
    model = make_model()
    optimizer = (cases.OPTIMIZERS | cases.OTHER_OPTIMIZERS)[optimizer_name](model)
    return model, make_data(), loss, optimizer


def trained(
    model_name: str,
    optimizer_name: str,
    shards: int,
    steps: int,
    *,
    schedule: Callable[[Any], Any] | None = None,
    schedule_every: str = "epoch",
    prepare: Callable[[Any], Any] = lambda thing: thing,
    **options: Any,
) -> unisono.Trainer:
    """Train a case; gives the trainer. `prepare` as of :func:`plain_loop`."""
    model, data, usual_loss, optimizer = made(model_name, optimizer_name)
    model = prepare(model)

    def loss(model: torch.nn.Module, batch: Any) -> Any:
        return usual_loss(model, [prepare(part) for part in batch])

    if schedule is not None:
        options["schedule"] = unisono.Schedule(schedule(optimizer), every=schedule_every)
    trainer = unisono.Trainer(model, optimizer, loss, shards=shards, seed=5, **options)
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=steps)
    return trainer


def check_bits(trainer: unisono.Trainer, plain: torch.nn.Module) -> None:
    """See that a trained model has the bits of another one."""
    seen, expected = trainer.run.model.state_dict(), plain.state_dict()
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(seen[name], value), name


def differentiate_and_step(value: torch.Tensor, model: Any, optimizer: Any) -> None:
    """Do what follows the forward pass where no recipe says more."""
    value.backward()
    optimizer.step()


def plain_loop(
    model_name: str,
    optimizer_name: str,
    steps: int,
    *,
    prepare: Callable[[Any], Any] = lambda thing: thing,
    around: Callable[[], Any] = contextlib.nullcontext,
    update: Callable[[torch.Tensor, Any, Any], None] = differentiate_and_step,
    schedule: Callable[[Any], Any] | None = None,
    schedule_every: str = "epoch",
    loss: Callable[..., Any] | None = None,
) -> Any:
    """Train a case with the sampler of one replica, batches in its order.

    Args:
        model_name, optimizer_name, steps: as for :func:`tests.parity.cases.train`.
        prepare: what is done to the model, and to each tensor of a batch.
        around: what the forward pass is computed within.
        update: takes (loss, model, optimizer) to the next parameters.
        schedule: makes a schedule of the optimizer's learning rate.
        schedule_every: ``"step"`` or ``"epoch"``.
        loss: another one than the case's.

    Returns:
        The model.
    """
    model, data, usual_loss, optimizer = made(model_name, optimizer_name)
    model = prepare(model)
    rates = None if schedule is None else schedule(optimizer)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=5)
    done, epoch = 0, 0
    while done < steps:
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, len(order), cases.BATCH_SIZE):
            if done == steps:
                break
            batch = [prepare(part) for part in data[order[start : start + cases.BATCH_SIZE]]]
            optimizer.zero_grad()
            with around():
                value = mean_of(loss or usual_loss, model, batch)
            update(value, model, optimizer)
            done += 1
            if rates is not None and schedule_every == "step":
                rates.step()
        else:
            epoch += 1
            if rates is not None and schedule_every == "epoch":
                rates.step()
    return model
