"""Programs as users write them, each for any device: all return what they do on the CPU.

Run in workers, so importable there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.chaos.exchanges import install
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of
from tests.loaders import loader_of
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset, TensorDataset

import unisono
from unisono.callbacks import EMA, Callback

PROGRAMS: dict[str, Callable[[str], Any]] = {}


def program(function: Callable[[str], Any]) -> Callable[[str], Any]:
    """Add a program to the list."""
    PROGRAMS[function.__name__] = function
    return function


def run_all(names: list[str], device: str) -> list[Any]:
    """Run programs one after the other in this worker; an error is a result, too."""
    install(device)
    found = []
    for name in names:
        try:
            found.append(PROGRAMS[name](device))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}".replace("sim:0", "sim"))
    return found


def data(num_samples: int = 43) -> TensorDataset:
    with torch.device("cpu"):  # also where a program has another by default
        return at_random(num_samples, 8, 4, seed=3)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.3), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(16, 4),
    )  # fmt: skip


def make(
    device: str,
    model: Callable[[], nn.Module] = net,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    loss: Callable[..., Any] = loss_of,
    shards: int = 4,
    **options: Any,
) -> unisono.Trainer:
    torch.manual_seed(0)
    made = model()
    updates = optimizer(made.parameters(), lr=0.01)
    return unisono.Trainer(made, updates, loss, shards=shards, device=device, **options)


FIT: dict[str, Any] = {"batch_size": 10, "steps": 7}


def fitted(
    device: str,
    *args: Any,
    dataset: Any = None,
    fit: dict[str, Any] = FIT,
    reading: dict[str, Any] | None = None,
    **options: Any,
) -> str:
    trainer = make(device, *args, **options)
    dataset = data(40) if dataset is None else dataset
    if reading is not None:
        dataset, fit = loader_of(dataset, FIT["batch_size"], **reading), {"steps": FIT["steps"]}
    trainer.fit(dataset, **fit)
    return trainer.digest()


# Models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.last = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(inputs)))))


@program
def parameters_frozen_and_thawed_between_fits(device):
    trainer = make(device)
    trainer.fit(data(40), batch_size=10, steps=3)
    trainer.run.model[0].requires_grad_(False)
    trainer.fit(data(40), batch_size=10, steps=5)
    trainer.run.model[0].requires_grad_(True)
    trainer.fit(data(40), batch_size=10, steps=7)
    return trainer.digest()


class Replacing(nn.Module):
    """Buffers of several kinds: replaced, changed in place, not saved, empty, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(2), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("nothing", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(inputs)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
            self.seen += len(inputs)
            self.last.copy_(outputs.detach().flatten()[:2])
        return outputs - self.mean


@program
def buffers_replaced_in_forward(device):
    return fitted(device, Replacing)


class Odd(nn.Module):
    """Parameters: complex, of 64 and 16 bits, scalar, empty, turned around, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64) * 0.1)
        self.fine = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
        self.rough = nn.Parameter(torch.randn(4, dtype=torch.float32).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 8).T)
        self.conv = nn.Conv2d(2, 4, 1).to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        turned = inputs @ self.turned + (inputs.double() @ self.fine).float()
        waves = torch.view_as_real(inputs.to(torch.complex64) @ self.wave).square().sum((1, 2))
        images = self.conv(inputs.view(-1, 2, 2, 2)).mean((2, 3))
        outputs = (turned + images + waves[:, None] + self.rough.float()) * self.scale
        return outputs + self.empty.sum()


@program
def odd_parameters_with_momentum_and_clipping(device):
    sgd = lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, foreach=False)  # noqa: E731
    return fitted(device, Odd, sgd, clip_norm=0.5)


class Recomputing(nn.Module):
    """Activation checkpointing, in both of torch's ways, over random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, inputs, use_reentrant=False)
        hidden = checkpoint(self.second, hidden.requires_grad_(), use_reentrant=True)
        return self.last(torch.relu(hidden))


@program
def activation_checkpointing(device):
    return fitted(device, Recomputing)


@program
def gradient_hooks(device):
    trainer = make(device)
    trainer.run.model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    trainer.fit(data(40), **FIT)
    return trainer.digest()


# Losses


@program
def a_dict_of_tensors_numbers_and_pairs(device):
    def loss(model, batch):
        outputs = model(batch[0])
        hits = (outputs.argmax(1) == batch[1]).sum()
        return {
            "loss": F.cross_entropy(outputs, batch[1]),
            "accuracy": (hits, len(batch[1])),
            "constant": 3,
            "peak": outputs.detach().max().double(),
            "flag": outputs.detach().max() > 0,
            "host": torch.tensor(2.5),
        }

    trainer = make(device, loss=loss)
    summary = trainer.fit(data(40), **FIT)
    return trainer.digest(), dict(summary.means)


class Summing(nn.Linear):
    """Keeps a sum in a buffer, in place."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.total += inputs.sum()
        return super().forward(inputs)


@program
def scalars_that_change_after_they_were_returned(device):
    counts = torch.zeros((), device=device)

    def loss(model, batch):
        found = loss_of(model, batch)
        counts.copy_(batch[1].float().mean())
        return {"loss": found, "total": model.total, "counts": counts}

    trainer = make(device, Summing, loss=loss)
    summary = trainer.fit(data(40), **FIT)
    return trainer.digest(), dict(summary.means)


@program
def a_loss_that_is_changed_after_it_was_given(device):
    torch.manual_seed(0)
    model = net()
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=4, device=device)
    means = []
    for step in run.steps(data(40), **FIT):
        with step:
            for batch in step.shards:
                loss = loss_of(model, batch)
                step.backward(loss)
                loss.detach().mul_(0)
        means.append(step.loss)
    return means


@program
def losses_that_are_brought_to_the_host(device):
    return fitted(device, loss=lambda model, batch: loss_of(model, batch).cpu())


@program
def a_loss_of_one_element_and_of_64_bits(device):
    return fitted(device, loss=lambda model, batch: loss_of(model, batch).double().view(1))


@program
def nan_in_one_shard_is_named_and_nothing_is_changed(device):
    dataset, digests = data(40), []
    dataset.tensors[0][17][0] = float("nan")

    class Noting(Callback):
        def on_step_begin(self, fit):
            digests.append(fit.model[0].weight.tolist())

    trainer = make(device, callbacks=[Noting()])
    try:
        trainer.fit(dataset, batch_size=10, epochs=1)
    except unisono.errors.NonFiniteLossError as error:
        is_unchanged = trainer.run.model[0].weight.tolist() == digests[-1]
        dataset.tensors[0][17][0] = 0.0
        trainer.fit(dataset, batch_size=10, epochs=2)
        return str(error), error.step, error.shard, is_unchanged, trainer.digest()
    return "no error"


# Data


@program
def batches_that_the_loss_changes_in_place(device):
    def loss(model, batch):
        batch[0].mul_(2)
        return loss_of(model, batch)

    trainer = make(device, loss=loss)
    trainer.fit(data(40), **FIT)
    return trainer.digest(), data(40).tensors[0].sum().item()


@program
def one_sample_and_empty_shards(device):
    linear = lambda: nn.Linear(8, 4)  # noqa: E731
    return fitted(device, linear, dataset=data(11), fit={"batch_size": 9, "epochs": 3}, shards=8)


# Order of things


@program
def a_model_and_optimizer_on_the_device_already(device):
    return fitted(device, lambda: net().to(device))


@program
def parameters_that_the_model_does_not_have(device):
    torch.manual_seed(0)
    model = net()
    extra = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]) * extra.to(batch[0].device), batch[1])

    trainer = unisono.Trainer(model, optimizer, loss, shards=4, device=device)
    trainer.fit(data(40), **FIT)
    return trainer.digest(), extra.tolist()


@program
def a_rate_that_is_a_tensor(device):
    adamw = lambda p, lr: torch.optim.AdamW(p, torch.tensor(lr), foreach=False)  # noqa: E731
    return fitted(device, optimizer=adamw)


@program
def averages_in_callbacks_and_hooks(device):
    ema = EMA(0.9, start=2)
    trainer = make(device, callbacks=[ema])
    average = AveragedModel(trainer.run.model, avg_fn=lambda a, b, n: a + (b - a) / (n + 1))

    class Averaging(Callback):
        def on_step_end(self, fit, step):
            average.update_parameters(fit.model)

    trainer.callbacks.append(Averaging())
    trainer.fit(data(40), **FIT)
    averaged = ema.model(trainer.run.model)
    means = trainer.evaluate(data(17), batch_size=9, model=averaged)
    other = trainer.evaluate(data(17), batch_size=9, model=average.module)
    return trainer.digest(), means, other


@program
def evaluation_prediction_and_metrics_between_steps(device):
    trainer = make(device)
    found = []
    for steps in (3, 7):
        trainer.fit(data(40), batch_size=10, steps=steps, validate=data(17), validate_every=2)
        found.append(trainer.evaluate(data(17), batch_size=9))
        rows = trainer.predict(data(17), batch_size=9)
        found.append((str(rows.device), rows.tolist()))
        found.append(trainer.digest())
    return found


@program
def predictions_of_dicts(device):
    trainer = make(device)
    trainer.fit(data(40), **FIT)

    def forward(model, batch):
        outputs = model(batch[0])
        return {"scores": outputs.softmax(1), "labels": outputs.argmax(1), "given": batch[1]}

    rows = trainer.predict(data(17), batch_size=9, forward=forward)
    return {name: rows[name].tolist() for name in rows}


@program
def a_loop_of_its_own_that_is_left(device):
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = unisono.Run(model, optimizer, shards=4, device=device)
    for turn in range(3):
        for step in taken(run, loss_of, data(40), batch_size=10, steps=9):
            if step.number == 2 + 2 * turn:
                break
    weight = model[0].weight.detach()
    return weight.cpu().tolist(), run.position.step, weight.device.type == torch.device(device).type


@program
def two_trainers_over_one_model(device):
    first = make(device)
    model = first.run.model
    first.fit(data(40), batch_size=10, steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = unisono.Trainer(model, optimizer, loss_of, shards=4, device=device)
    second.fit(data(40), batch_size=10, steps=3)
    return first.digest(), second.digest()


@program
def weights_and_state_changed_between_fits(device):
    trainer = make(device)
    trainer.fit(data(40), batch_size=10, steps=3)
    with torch.no_grad():
        trainer.run.model[0].weight.mul_(0.5)
        trainer.run.model[1].running_mean.zero_()
    for state in trainer.run.optimizer.state.values():
        state["exp_avg"].mul_(0.5)
    trainer.fit(data(40), batch_size=10, steps=7)
    return trainer.digest()


@program
def weights_loaded_between_fits(device):
    trainer = make(device)
    trainer.fit(data(40), batch_size=10, steps=3)
    kept = {name: value.clone() for name, value in trainer.run.model.state_dict().items()}
    optimizer = copy.deepcopy(trainer.run.optimizer.state_dict())
    trainer.fit(data(40), batch_size=10, steps=5)
    trainer.run.model.load_state_dict({name: value.cpu() for name, value in kept.items()})
    trainer.run.optimizer.load_state_dict(optimizer)
    trainer.fit(data(40), batch_size=10, steps=7)
    return trainer.digest()


@program
def a_step_of_its_own_between_fits(device):
    trainer = make(device, Tied)
    trainer.fit(data(40), batch_size=10, steps=3)
    model, optimizer = trainer.run.model, trainer.run.optimizer
    where = next(model.parameters()).device
    loss_of(model, [one[:10].to(where) for one in data(40).tensors]).backward()
    optimizer.step()
    optimizer.zero_grad()
    trainer.fit(data(40), batch_size=10, steps=7)
    return trainer.digest()


@program
def clipping_in_a_hook(device):
    trainer = make(device)
    parameters = list(trainer.run.model.parameters())
    trainer.run.optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(parameters, 0.1) and None
    )
    trainer.fit(data(40), **FIT)
    return trainer.digest()


@program
def clipping_by_norm_and_by_value(device):
    return [fitted(device, **{name: 0.05}) for name in ("clip_norm", "clip_value")]


@program
def half_precision(device):
    return [fitted(device, precision=precision) for precision in ("bf16", "fp16")]


@program
def images_with_their_channels_last(device):
    def model():
        convolution = nn.Conv2d(2, 4, 1)
        return nn.Sequential(convolution, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4))

    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    return with_channels_last(device, model, sgd)


@program
def state_that_is_older_than_the_layout(device):
    def model():
        return nn.Sequential(nn.Conv2d(2, 4, 2, padding=1), nn.Flatten(), nn.Linear(36, 4))

    adagrad = functools.partial(torch.optim.Adagrad, fused=True)
    return with_channels_last(device, model, adagrad)


def with_channels_last(device: str, model: Any, optimizer: Any) -> str:
    inputs, labels = data(40).tensors
    images = TensorDataset(inputs.view(-1, 2, 2, 2), labels)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, [batch[0].to(memory_format=torch.channels_last), batch[1]])

    torch.manual_seed(0)
    made = model()
    updates = optimizer(made.parameters(), lr=0.01)
    made.to(memory_format=torch.channels_last)
    trainer = unisono.Trainer(made, updates, loss, shards=4, device=device)
    trainer.fit(images, **FIT)
    return trainer.digest()


@program
def optimizers_that_keep_their_steps_otherwise(device):
    makers: list[Callable[..., torch.optim.Optimizer]] = [
        lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True),
        lambda p, lr: torch.optim.Adam(p, lr=lr, foreach=True),
        lambda p, lr: torch.optim.Adagrad(p, lr=lr),
        lambda p, lr: torch.optim.RMSprop(p, lr=lr, centered=True, momentum=0.3),
        lambda p, lr: torch.optim.Adafactor(p, lr=lr),
        lambda p, lr: torch.optim.ASGD(p, lr=lr, foreach=False),
    ]
    return [fitted(device, optimizer=one) for one in makers]


@program
def numbers_drawn_between_steps(device):
    """A program that draws between steps, and in its loss from the device."""

    def loss(model, batch):
        noise = torch.randn(batch[0].shape, device=batch[0].device)
        return loss_of(model, (batch[0] + 0.1 * noise, batch[1]))

    return fitted(device, loss=loss)


@program
def state_that_the_program_keeps(device):
    trainer = make(device)
    trainer.run.state["mine"] = {"tensor": torch.arange(3, device=device), "number": 1}
    trainer.fit(data(40), **FIT)
    kept = trainer.run.state["mine"]["tensor"]
    return kept.tolist(), kept.device.type == torch.device(device).type


@program
def a_default_device_that_is_set(device):
    import tempfile

    torch.set_default_device(device)
    try:
        with tempfile.TemporaryDirectory() as folder:
            is_alone = unisono.world().world_size == 1
            options = {"directory": folder} if is_alone else {}
            trainer = make(device, Replacing, torch.optim.Adafactor, clip_norm=1.0, **options)
            rows = Subset(data(43), range(40))
            trainer.fit(rows, batch_size=10, steps=3, validate=data(17))
            if is_alone:
                trainer = make(device, Replacing, torch.optim.Adafactor, clip_norm=1.0, **options)
            trainer.fit(rows, **FIT)
            predicted = trainer.predict(data(17), batch_size=9).tolist()
            means = trainer.evaluate(data(17), batch_size=9)
        found = trainer.digest(), predicted, means
        return *found, fitted(device, precision="fp16"), optimizers(device)
    finally:
        torch.set_default_device(None)


def optimizers(device: str) -> list[str]:
    makers = (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.RMSprop)
    return [fitted(device, optimizer=maker) for maker in makers]


@program
def another_current_device(device):
    """A program that changes the current device behind our back."""
    if device == "cpu":
        return fitted(device)
    module = torch.get_device_module(torch.device(device))
    before = module.current_device()

    def loss(model, batch):
        module.set_device(3)
        return loss_of(model, batch)

    try:
        return fitted(device, loss=loss)
    finally:
        module.set_device(before)
