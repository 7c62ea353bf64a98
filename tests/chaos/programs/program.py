"""A random program as a user might have written it: what ``choices`` says, trained to its end.

Run as a script, with what :class:`Told` has as JSON, it prints what has come of it on every worker,
as ``result: {…}``. All of that must be the same however many workers there are and whatever
happens to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import unisono
from unisono.callbacks import EMA, Callback, EarlyStopping, EventLog

try:
    from unisono.engine.state.contents import digest_of
except ModuleNotFoundError:  # the tag `wide`
    from unisono.state.digest import digest_of

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.chaos.exchanges import install
from tests.chaos.phases import Recorder
from tests.chaos.programs.blocks import Model, loss_of
from tests.chaos.programs.choices import Choices, choose
from tests.chaos.programs.recipes import optimizer_of, schedule_of
from tests.chaos.programs.samples import CutAnew, collate, dataset_of, sampler_of
from tests.loaders import loader_of

CLIPS: dict[str, dict[str, float]] = {
    "none": {},
    "norm": {"clip_norm": 0.3},
    "value": {"clip_value": 0.02},
    "look": {"clip_norm": float("inf")},
}
NUM_VALIDATED = 17
# Another version may run this program, too: one whose options do not stand together yet.
IS_OLDER = "checkpoint_every" in inspect.signature(unisono.Run).parameters
NORMALIZING = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.Dropout)


@dataclass(frozen=True)
class Told:
    """What differs between the ways in which one program is run.

    `events` is the event file where there is no directory; `phases` a folder in which every worker
    keeps where it is; `pace_ms` how long each shard's forward pass sleeps.
    """

    seed: int
    directory: str = ""
    events: str = ""
    phases: str = ""
    pace_ms: float = 0.0
    device: str = "cpu"


class Modes(Callback):
    """Fixes the first layer in the midst of a run, and puts normalization into ``eval()``."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def on_step_begin(self, fit: Any) -> None:
        change_modes(self._choices, fit.model, fit.step)


def change_modes(choices: Choices, model: nn.Module, step: int) -> None:
    """Do what is to be done before a step."""
    if step == choices.freezes_at:
        model.first.requires_grad_(False)
    if step == choices.thaws_at:
        model.first.requires_grad_(True)
    if step == choices.evaluates_at:
        for module in model.modules():
            if isinstance(module, NORMALIZING):
                module.eval()


def laid_out(part: Any) -> Any:
    """Lay images out with their channels last."""
    is_image = isinstance(part, torch.Tensor) and part.dim() == 4
    return part.to(memory_format=torch.channels_last) if is_image else part


class Program:
    """What both loops need. Final."""

    def __init__(self, told: Told) -> None:
        self.told = told
        install(told.device)
        self.choices = choices = choose(told.seed)
        torch.manual_seed(choices.seed)
        self.model = Model(choices)
        self.optimizer = optimizer_of(choices, self.model)
        if choices.is_channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.schedule = schedule_of(choices, self.optimizer)
        self.train_set = dataset_of(choices, choices.num_samples, 1)
        self.test_set = dataset_of(choices, NUM_VALIDATED, 2)
        self.loss = loss_of(choices.loss)
        self.recorder: Recorder | None = None
        reading: dict[str, Any] = {
            "batch_size": choices.batch_size,
            "num_workers": choices.loader_workers,
            "collate_fn": collate if choices.dataset == "collated" else None,
        }
        order = {"shuffle": choices.shuffle, "sampler": sampler_of(choices)}
        self.train_loader = loader_of(self.train_set, **reading, **order)
        self.test_loader = loader_of(self.test_set, **reading)
        if choices.cuts_batches:
            batches: Any = CutAnew(choices.num_samples, choices.steps_per_epoch)
            options = {name: reading[name] for name in ("num_workers", "collate_fn")}
            self.train_loader = DataLoader(self.train_set, batch_sampler=batches, **options)
        self.settings: dict[str, Any] = {
            "shards": choices.shards,
            "seed": choices.seed,
            "directory": told.directory or None,
            "checkpoint": 3 if told.directory else None,
            **CLIPS[choices.clip],
        }
        self.schedule_options: dict[str, Any] = {"schedule": None}
        if self.schedule is not None and not IS_OLDER:
            schedule = unisono.Schedule(self.schedule, every=choices.schedule_every)
            self.schedule_options = {"schedule": schedule}
        if IS_OLDER:
            self.settings["checkpoint_every"] = self.settings.pop("checkpoint")
            every = choices.schedule_every
            self.schedule_options = {"schedule": self.schedule, "schedule_every": every}
        if "device" in inspect.signature(unisono.Run).parameters:  # older versions have none
            self.settings["device"] = told.device

    def attach(self, run: unisono.Run) -> None:
        """Have phases told, and take part in them."""
        self.recorder = Recorder.attach(run, self.told.phases)

    def compute(self, model: nn.Module, batch: Any) -> Any:
        """Compute the loss of one shard, slowly if that was asked for."""
        assert self.recorder is not None
        self.recorder.note("forward" if model.training else "evaluate")
        if model.training:
            time.sleep(self.told.pace_ms / 1000)
        if self.choices.is_channels_last:
            batch = torch.utils._pytree.tree_map(laid_out, batch)
        return self.loss(model, batch)

    def totals(self) -> Iterator[int]:
        """Give the epochs after which each call of `fit` ends."""
        for part in range(1, self.choices.fits + 1):
            yield max(1, self.choices.epochs * part // self.choices.fits)


def with_trainer(program: Program) -> dict[str, Any]:
    """Train with a Trainer."""
    choices = program.choices
    ema = EMA(0.9, start=2)
    callbacks: list[Callback] = [Modes(choices)]
    callbacks += [ema] * choices.has_ema
    callbacks += [EarlyStopping(2, min_delta=0.01)] * choices.has_early_stopping
    callbacks += [EventLog(program.told.events)] if program.told.events else []
    trainer = unisono.Trainer(
        program.model,
        program.optimizer,
        program.compute,
        precision=choices.precision,
        callbacks=callbacks,
        **program.schedule_options,
        **program.settings,
    )
    program.attach(trainer.run)
    found: dict[str, Any] = {}
    for epochs in program.totals():
        summary = trainer.fit(
            program.train_loader,
            epochs=epochs,
            validate=program.test_loader if choices.cuts_batches else program.test_set,
            validate_every=choices.validate_every or "1 epoch",
        )
        found[f"validation after {epochs}"] = summary.validation
        if choices.predicts_in_between:
            found[f"rows after {epochs}"] = rows_of(trainer, program, None)
    averaged = ema.model(program.model) if ema.num_averaged else None
    means = trainer.evaluate(program.test_loader)
    found["evaluated"], found["by all"] = means, trainer.digest()
    found["rows"] = rows_of(trainer, program, averaged)
    return {**found, **end_of(program, trainer.run)}


def rows_of(trainer: unisono.Trainer, program: Program, model: nn.Module | None) -> str:
    """Hash what is predicted."""
    rows = trainer.predict(program.test_loader, model=model)
    return hashlib.sha256(rows.contiguous().float().numpy().tobytes()).hexdigest()


def with_own_loop(program: Program) -> dict[str, Any]:
    """Train with a loop of the program's own."""
    choices, model = program.choices, program.model
    device = torch.device(program.told.device).type
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[choices.precision]
    around: Callable[[], Any] = contextlib.nullcontext
    if dtype is not None:
        around = lambda: torch.autocast(device, dtype)  # noqa: E731
    scaler = torch.amp.GradScaler(device) if choices.precision == "fp16" else None
    scaling = {"grad_scaler" if IS_OLDER else "scaler": scaler}
    run = unisono.Run(model, program.optimizer, **scaling, **program.settings)
    program.attach(run)
    if program.schedule is not None:
        run.state["schedule"] = program.schedule
    run.state["losses"] = []
    model.train()
    for epochs in program.totals():
        for step in run.steps(program.train_loader, epochs=epochs):
            change_modes(choices, model, step.number)
            with step:
                for batch in step.shards:
                    with around():
                        loss = program.compute(model, batch)
                    step.backward(loss)
            if step.is_done:
                run.state["losses"] = [*run.state["losses"], step.loss]
                step_schedule(program, run, step.loss)
    return {"losses": run.state["losses"], **end_of(program, run)}


def step_schedule(program: Program, run: unisono.Run, loss: float) -> None:
    """Have the schedule step where that is due."""
    choices, schedule = program.choices, program.schedule
    if schedule is None or (choices.schedule_every == "epoch" and run.position.batch):
        return
    if choices.schedule == "plateau":
        schedule.step(loss)
    else:
        schedule.step()


def end_of(program: Program, run: unisono.Run) -> dict[str, Any]:
    """Tell how a run has ended."""
    return {
        "digest": digest_of(program.model, program.optimizer),
        "step": run.position.step,
        "last": run.last["means"],
        "rates": [float(group["lr"]) for group in program.optimizer.param_groups],
        "fixed": [n for n, p in program.model.named_parameters() if not p.requires_grad],
        "modes": [n for n, module in program.model.named_modules() if not module.training],
    }


def train(told: Told) -> dict[str, Any]:
    """Train to the end; returns what must be the same on every worker of every run."""
    program = Program(told)
    with contextlib.redirect_stdout(sys.stderr):
        return (with_trainer if program.choices.loop == "trainer" else with_own_loop)(program)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("result:", json.dumps(train(Told(**json.loads(sys.argv[1])))), flush=True)


if __name__ == "__main__":
    main()
