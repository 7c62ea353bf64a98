"""What somebody would write without us: a plain torch loop, with the lines that recipes change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from tests.parity import cases
from torch.utils.data import DistributedSampler

import unisono
from unisono.plan.seeds import seed_of


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


Update = Callable[[torch.Tensor, Any, Any], None]


def update_by(
    *, clip_norm: float | None = None, clip_value: float | None = None, scaler: Any = None
) -> Update:
    """Give what follows the forward pass, as torch's pages write it: (loss, model, optimizer)."""
    scaling = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler

    def update(value: torch.Tensor, model: Any, optimizer: Any) -> None:
        scaling.scale(value).backward()
        scaling.unscale_(optimizer)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        scaling.step(optimizer)
        scaling.update()

    return update


PLAIN_UPDATE = update_by()


def take_steps(
    model: torch.nn.Module,
    data: Any,
    loss: Callable[..., Any],
    optimizer: Any,
    steps: int,
    *,
    batch_size: int = cases.BATCH_SIZE,
    prepare: Callable[[Any], Any] = lambda thing: thing,
    around: Callable[[], Any] = contextlib.nullcontext,
    update: Update = PLAIN_UPDATE,
    rates: dict[str, Any] | None = None,
) -> None:
    """Train with the sampler of one replica, batches in its order, seeded as the run's are.

    Each tensor of a batch is prepared, the forward pass computed `around` something. `rates` has
    a schedule, under how often it is stepped: ``"step"`` or ``"epoch"``.
    """
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0, seed=5)
    done, epoch, rates = 0, 0, rates or {}
    while done < steps:
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, len(order), batch_size):
            if done == steps:
                return
            batch = [prepare(part) for part in data[order[start : start + batch_size]]]
            torch.manual_seed(seed_of("train", 5, done))
            optimizer.zero_grad()
            with around():
                value = mean_of(loss, model, batch)
            update(value, model, optimizer)
            done += 1
            if "step" in rates:
                rates["step"].step()
        epoch += 1
        if "epoch" in rates:
            rates["epoch"].step()


def plain_loop(
    model_name: str,
    optimizer_name: str,
    steps: int,
    *,
    prepare: Callable[[Any], Any] = lambda thing: thing,
    schedule: Callable[[Any], Any] | None = None,
    schedule_every: str = "epoch",
    loss: Callable[..., Any] | None = None,
    **how: Any,
) -> Any:
    """Train a case, perhaps with another loss, as :func:`take_steps` does; gives the model."""
    model, data, usual_loss, optimizer = made(model_name, optimizer_name)
    model = prepare(model)
    how["rates"] = {} if schedule is None else {schedule_every: schedule(optimizer)}
    take_steps(model, data, loss or usual_loss, optimizer, steps, prepare=prepare, **how)
    return model


def one_weight(loss: Callable[..., Any], steps: int, **options: Any) -> tuple[Any, ...]:
    """Train one weight that is 1; gives what its steps say, the weight, and how many there were."""
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=1.0), shards=2, **options)
    said = []
    for step in run.steps(torch.ones(8, 3), batch_size=4, steps=steps, shuffle=False):
        with step:
            for batch in step.shards:
                step.backward(loss(model(batch), step.number))
        said.append((step.is_skipped, step.is_done, step.gradient_norm))
    return said, model.weight.detach().clone(), run.position.step
