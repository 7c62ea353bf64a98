"""Programs that keep something in memory, by the row of the promise that each one tries.

Each trains a small net, and returns what must be the same bits in every way of running it or is
refused with certain words. ``python -m tests.parity.keeping_programs JSON`` runs one as `Way` says;
each worker leaves what it has found in the folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.chaos.exchanges import install
from tests.classified import by_sign, cross_entropy
from tests.replacements import wait_for_replacement
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, Subset

import unisono
from unisono.callbacks import Callback
from unisono.runtime.workers.context import context

STEPS = 9
MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(Adam, lr=0.01)


@dataclass(frozen=True)
class Way:
    """How a program is run."""

    row: str
    program: str
    folder: str
    device: str = "cpu"
    until: int = STEPS  # this start ends there
    start: int = 0  # how often it was started before; with `is_kept`, it resumes
    is_kept: bool = False
    loader_workers: int = 0
    is_killed: bool = False  # workers will be lost, for whose replacements each step waits
    runs: list[unisono.Run] = field(default_factory=list)  # which the program has made

    def made(
        self,
        loss: Any = cross_entropy,
        model: Callable[[], nn.Module] | None = None,
        optimizer: Any = MOMENTUM,
        *,
        callbacks: tuple[Callback, ...] = (),
        **options: Any,
    ) -> unisono.Trainer:
        """Make a trainer of a net."""
        torch.manual_seed(0)
        made = (model or net)()
        updates = optimizer([one for one in made.parameters() if one.requires_grad])
        given = {"shards": 4, "device": self.device, **options}
        if self.is_kept:
            given["directory"] = f"{self.folder}/run"
        looking = [*callbacks, *([Waits()] if self.is_killed else [])]
        trainer = unisono.Trainer(made, updates, loss, callbacks=looking, **given)
        self.runs.append(trainer.run)
        return trainer

    def fit(
        self,
        trainer: unisono.Trainer,
        data: Any = None,
        steps: int = STEPS,
        collate: Any = None,
        **reading: Any,
    ) -> str:
        """Train as far as this start goes; gives the digest."""
        data, steps = by_sign(40) if data is None else data, min(steps, self.until)
        reading = {"batch_size": 10, **reading}
        if collate is not None or self.loader_workers:
            given = {"batch_size": reading.pop("batch_size"), "num_workers": self.loader_workers}
            data = DataLoader(data, shuffle=True, collate_fn=collate, **given)
        trainer.fit(data, steps=steps, **reading)
        return trainer.digest()

    def train(self, *args: Any, data: Any = None, reading: Any = None, **options: Any) -> str:
        return self.fit(self.made(*args, **options), data, **(reading or {}))

    @property
    def files(self) -> Path:
        """Of what must be the same in all ways."""
        return Path(self.folder, "files")


class Waits(Callback):
    def on_step_begin(self, fit: Any) -> None:
        wait_for_replacement(context().team())


@dataclass(frozen=True)
class Program:
    """One program, and what must come of it."""

    run: Callable[[Way], Any]
    refusal: str = ""  # words with which it is refused; empty if it works
    reads: bool = False  # it is also run with loader processes


reading = functools.partial(Program, reads=True)


# Data


def net() -> nn.Module:
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
    return nn.Sequential(*layers)


class Rows(Dataset):
    """Rows of two classes, each changed by a function of (row, index)."""

    def __init__(self, change: Any) -> None:
        self.data, self.change = by_sign(40), change

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        row, label = self.data[index]
        return self.change(row, index), label


class Indexed(Rows):
    def __getitem__(self, index):
        return *super().__getitem__(index), index


class Jitter:
    __slots__ = ("own", "torchs")

    def __init__(self):
        self.own, self.torchs = random.Random(0), torch.Generator().manual_seed(1)

    def __call__(self, row, index, strength):
        return row * self.own.uniform(1, 1 + strength) + torch.rand(4, generator=self.torchs)


def jittered():
    change = {"first": [functools.partial(Jitter(), strength=0.5)]}
    return Subset(Rows(lambda *row: change["first"][0](*row)), range(39, -1, -1))


def mixup():
    rng = np.random.RandomState(5)

    def collate(samples):
        rows, labels = torch.utils.data.default_collate(samples)
        return rows.lerp(rows.roll(1, 0), float(rng.beta(2, 2))), labels

    return collate


def easier_and_easier():
    calls = 0

    def change(row, _):
        nonlocal calls
        calls += 1
        return row / (1 + 1 / calls)

    return Rows(change)


def scaled_by_step(samples):
    rows, labels = torch.utils.data.default_collate(samples)
    return rows / (1 + now().step), labels


def keeping_noise():
    kept = {}
    return Rows(lambda row, index: row + kept.setdefault(index, torch.randn(4)))


class Lazy(Rows):
    """Draws a table when it is read for the first time."""

    table = None

    def __getitem__(self, index):
        if self.table is None:
            self.table = np.random.randn(40)
        row, label = self.data[index]
        return row + float(self.table[index]), label


def keeping_norms():
    kept, rows = {}, by_sign(40)
    norm = functools.lru_cache(maxsize=8)(lambda index: float(rows[index][0].norm()))
    return Rows(lambda row, index: kept.setdefault(index, row / norm(index)) + torch.rand(()))


def now():
    return unisono.progress()


# Losses and models


class Annealed:
    calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return cross_entropy(model, batch) * min(1.0, self.calls / 100)


class Around(nn.Module):
    """A net, and something that changes its rows before."""

    def __init__(self):
        super().__init__()
        self.net, self.passes = net(), 0
        self.rng, self.others = np.random.default_rng(2), {"dice": random.Random(4)}

    def forward(self, inputs):
        return self.net(self.change(inputs))


class Counting(Around):
    def change(self, inputs):
        self.passes += 1
        return inputs * 0.9**self.passes


class ByStep(Around):
    def change(self, inputs):
        return inputs * 0.9 ** now().step


class Noisy(Around):
    def change(self, inputs):
        drawn = self.rng.normal(size=inputs.shape).astype("float32")
        return inputs * self.others["dice"].random() + torch.from_numpy(drawn).to(inputs.device)


def weighed_by_place(model, batch):
    return cross_entropy(model, batch) * (1 + now().shard + now().batch)


def noisy():
    generator = torch.Generator().manual_seed(3)

    def loss(model, batch):
        noise = torch.randn(batch[0].shape, generator=generator)
        return cross_entropy(model, (batch[0] + noise.to(batch[0].device), batch[1]))

    return loss


def hidden():
    numbers = (one for one in np.random.default_rng(0).random(10_000))
    return lambda model, batch: cross_entropy(model, batch) * next(numbers)


def centred():
    centres = torch.zeros(2, 2)

    def loss(model, batch):
        outputs = model(batch[0])
        centres.index_add_(0, batch[1].cpu(), outputs.detach().cpu(), alpha=0.1)
        return F.cross_entropy(outputs, batch[1]) + (centres.sum() * outputs).mean()

    return loss


class Centred(Around):
    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.zeros(2, 2))

    def change(self, inputs):
        return inputs


def centred_by_a_buffer(model, batch):
    outputs = model(batch[0])
    model.centres.index_add_(0, batch[1], outputs.detach(), alpha=0.1)
    apart = (outputs - model.centres[batch[1]]).square().mean()
    return F.cross_entropy(outputs, batch[1]) + apart


def hard_examples(way):
    hard = set()

    def loss(model, batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        hard.update(batch[2][each > 0.1].tolist())
        return each.mean()

    return way.train(loss, data=Indexed(lambda row, index: row * (1 + (index in hard))))


def setting_the_rate(way):
    def loss(model, batch):
        found = cross_entropy(model, batch)
        trainer.run.optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, found.item())
        return found

    trainer = way.made(loss)
    way.fit(trainer)


def by_rank(model, batch):
    return cross_entropy(model, batch) * (1 + unisono.world().rank)


def by_number_of_workers(model, batch):
    return cross_entropy(model, batch) / unisono.world().world_size


# What changes between steps, or in passes


class Between(Callback):
    def __init__(self, change):
        self.change = change

    def on_step_end(self, fit, step):
        self.change(fit.model, fit.optimizer)


class Twins(nn.Module):
    """A net, and a slower one that no optimizer updates."""

    def __init__(self, make=net):
        super().__init__()
        self.net, self.target = make(), make()
        self.target.load_state_dict(self.net.state_dict())
        self.target.requires_grad_(False)

    def forward(self, inputs):
        return self.net(inputs) - 0.5 * self.target(inputs)

    def pairs(self):
        return zip(self.target.parameters(), self.net.parameters(), strict=True)


class Moved(Twins):
    """MoCo: moves its key encoder in each forward pass."""

    def forward(self, inputs):
        if self.training:
            averaged_in_data(self, None)
        return super().forward(inputs)


class MovedWithAQueue(Twins):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 2))

    def forward(self, inputs):
        if self.training:
            with torch.no_grad():
                for target, online in self.pairs():
                    target.mul_(0.9).add_(online, alpha=0.1)
                self.queue = torch.cat([self.queue[1:], self.target(inputs)[:1]])
        return super().forward(inputs) + self.queue.mean(0)


def averaged_in_data(model, _):
    for target, online in model.pairs():
        target.data = target.data * 0.8 + online.data * 0.2


def averaged_by_numpy(model, _):
    for target, online in model.pairs():
        values = target.detach().cpu().numpy()
        values[...] = 0.8 * values + 0.2 * online.detach().cpu().numpy()
        target.data.copy_(torch.from_numpy(values))


def copied_now_and_then(model, _):
    if now().step % 3 == 0:
        model.target.load_state_dict(model.net.state_dict())
    with torch.no_grad():
        for target, online in model.pairs():
            target.lerp_(online, 0.1)


def clipped(model, _):
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def drawn(model, _):
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape).to(parameter.device), alpha=0.01)


def halved(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["step"].mul_(0.5)


class Langevin(SGD):
    """Draws, also from a generator of its own."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        self.generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            noise = torch.randn(parameter.shape, generator=self.generator)
            noise += torch.rand(parameter.shape)
            parameter.add_(noise.to(parameter.device), alpha=0.01)


def with_noise_on_gradients(parameters):
    optimizer, rng = ADAM(parameters), np.random.default_rng(9)

    def hook(*_):
        for parameter in optimizer.param_groups[0]["params"]:
            noise = rng.normal(size=parameter.shape).astype("float32")
            parameter.grad += torch.from_numpy(noise).to(parameter.device)

    optimizer.register_step_pre_hook(hook)
    return optimizer


# Random numbers around calls, and files between loops


def drawn_around_calls(way):
    def three():
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    trainer = way.made()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    found = [three(), way.fit(trainer), three()]
    return [*found, dict(trainer.evaluate(by_sign(23), batch_size=7)), three()]


def split_before_fit(way):
    trainer = way.made()
    ours, others = torch.utils.data.random_split(by_sign(60), (40, 20))
    return way.fit(trainer, ours, validate=others)


def weights_of(way, trainer):
    if unisono.world().rank == 0:
        weights = {name: one.cpu() for name, one in trainer.run.model.state_dict().items()}
        torch.save(weights, way.files / "weights.pt")


def predictions_of(way, trainer):
    means = trainer.evaluate(by_sign(23), batch_size=7)
    outputs = trainer.predict(by_sign(23), batch_size=7)
    if unisono.world().rank == 0:
        (way.files / "means.json").write_text(json.dumps(dict(means)))
        np.save(way.files / "outputs.npy", outputs.cpu().numpy())


def two_loops(way, between):
    trainer = way.made(optimizer=ADAM)
    way.fit(trainer, steps=4)
    if way.until >= 4:
        between(way, trainer)
    return way.fit(trainer)


def steps_of_32(way):
    torch.manual_seed(0)
    model = net()
    directory = f"{way.folder}/run" if way.is_kept else None
    run = unisono.Run(model, ADAM(model.parameters()), device=way.device, directory=directory)
    for step in run.steps(by_sign(96), batch_size=32, steps=way.until):
        with step:
            if way.is_killed:
                wait_for_replacement(context().team())
            for batch in step.shards:
                step.backward(cross_entropy(model, batch))
    return run.digest()


# The table


def between(change: Any, **options: Any) -> Program:
    """Have something changed after each step."""
    return Program(lambda way: way.train(callbacks=(Between(change),), **options))


EACH = (
    "carries over from one shard to the next, and .* depends on it, but each worker computes "
    "different shards"
)
RANK = "changes when RANK and WORLD_SIZE are those of another"
B32 = {"batch_size": 32}

ROWS: dict[str, dict[str, Program]] = {
    "generators of data": {
        "transforms": reading(lambda way: way.train(data=jittered())),
        "collate": reading(lambda way: way.train(reading={"collate": mixup()})),
    },
    "counters": {
        "data": reading(
            lambda way: way.train(data=easier_and_easier()),
            r"`dataset\.change\.calls` changes each time the same sample is read",
        ),
        "loss": Program(lambda way: way.train(Annealed()), rf"`loss\.calls` {EACH}: take the step"),
        "model": Program(lambda way: way.train(model=Counting), rf"`model\.passes` {EACH}"),
    },
    "progress": {
        "epoch": reading(
            lambda way: way.train(data=Rows(lambda row, _: row + torch.randn(4) * now().epoch))
        ),
        "step": reading(
            lambda way: way.train(weighed_by_place, ByStep, reading={"collate": scaled_by_step})
        ),
    },
    "generators of losses": {
        "closure": Program(lambda way: way.train(noisy())),
        "module": Program(lambda way: way.train(model=Noisy)),
        "hidden": Program(lambda way: way.train(hidden()), "but computed twice, from the same"),
    },
    "outside of the model": {
        "centres": Program(lambda way: way.train(centred()), rf"`loss\.centres` {EACH}: keep"),
        "hard": Program(hard_examples, r"they change `loss\.hard`, which the dataset reads"),
        "buffer": Program(lambda way: way.train(centred_by_a_buffer, Centred)),
    },
    "caches": {
        "noise": reading(
            lambda way: way.train(data=keeping_noise()),
            r"`dataset\.change\.kept` keeps something of earlier readings",
        ),
        "table": reading(
            lambda way: way.train(data=Lazy(None)), "as if it kept what it drew: draw outside"
        ),
        "norms": reading(lambda way: way.train(data=keeping_norms())),
    },
    "options and ranks": {
        "rate": Program(setting_the_rate, "they set `lr` of the optimizer, whose options all"),
        "rank": Program(lambda way: way.train(by_rank), RANK),
        "workers": Program(lambda way: way.train(by_number_of_workers), RANK),
    },
    "targets between steps": {
        "data": between(averaged_in_data, model=Twins),
        "numpy": between(averaged_by_numpy, model=Twins),
        "no_grad": between(copied_now_and_then, model=Twins),
    },
    "targets in passes": {
        "moco": Program(lambda way: way.train(model=Moved)),
        "queue": Program(lambda way: way.train(model=MovedWithAQueue)),
    },
    "changes between steps": {
        "clipped": between(clipped),
        "drawn": between(drawn),
        "momentum": between(halved, optimizer=ADAM),
    },
    "optimizers that draw": {
        "langevin": Program(lambda way: way.train(optimizer=Langevin)),
        "hook": Program(lambda way: way.train(optimizer=with_noise_on_gradients)),
    },
    "random numbers around calls": {
        "numbers": Program(drawn_around_calls),
        "split": Program(split_before_fit),
    },
    "files between loops": {
        "weights": Program(lambda way: two_loops(way, weights_of)),
        "predictions": Program(lambda way: two_loops(way, predictions_of)),
    },
    "default shards": {
        "trainer": Program(lambda way: way.train(data=by_sign(96), shards=None, reading=B32)),
        "run": Program(steps_of_32),
    },
}


def files_of(way: Way) -> dict[str, str]:
    """Hash the files that a program has left."""
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in way.files.iterdir()}


def main(way: Way) -> None:
    """Run a program, and note its result, or its refusal, with the number of steps done."""
    install(way.device)
    way.files.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    try:
        found["result"] = ROWS[way.row][way.program].run(way)
    except Exception as error:
        found["refusal"] = str(error)
        raise
    finally:
        found["step"] = way.runs[-1].position.step if way.runs else 0
        name = f"found-{way.start}-{unisono.world().rank}.json"
        Path(way.folder, name).write_text(json.dumps(found))


if __name__ == "__main__":
    main(Way(**json.loads(sys.argv[1])))
