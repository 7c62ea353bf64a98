"""What the chaos tests train: quick, and with all that could go wrong in it.

A model with BatchNorm and Dropout, with Adam (cut into pieces), Adafactor or Adam that clips by the
norm (both need whole parameters); as a loop of its own with a schedule in ``run.state``, or three
calls of `fit` with validation. Everything that must not depend on who was lost when is returned.

Run as a script, with the options as JSON, it prints that as ``result: {…}`` on every worker.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import EventLog
from unisono.engine.state.contents import digest_of

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.chaos.exchanges import install
from tests.chaos.phases import Recorder

SHARDS = 5
BATCH_SIZE = 20
NUM_SAMPLES = 110  # six steps an epoch, the last of half the size
STEPS_PER_EPOCH = 6
NUM_EPOCHS = 4
NUM_STEPS = STEPS_PER_EPOCH * NUM_EPOCHS
NOBODY_COMES_S = 60.0
GATE_STEP = 11


@dataclass(frozen=True)
class Options:
    """What is trained.

    `epochs` are in total, in three calls of `fit`; `every`: steps between checkpoints, 0: only at
    the end; `hold`: steps in which those who go on wait until a replacement has caught up; `gate`:
    a file for which they wait in step 11; `pace_ms`: how long each shard's forward pass sleeps, in
    every `slow_every`-th step ten times as long; `phases`: a folder in which workers keep where
    they are; `events`: the event file of ``"trainer"``, where there is no directory.
    """

    loop: str = "trainer"
    optimizer: str = "adam"
    epochs: int = NUM_EPOCHS
    repeats: int = 1
    directory: str = ""
    every: int = 0
    keep: int = 3
    hold: tuple[int, ...] = ()
    gate: str = ""
    pace_ms: float = 0.0
    slow_every: int = 0
    phases: str = ""
    events: str = ""
    device: str = "cpu"


def train(options: Options) -> dict[str, object]:
    """Train to the end; returns what must be the same on every worker of every run."""
    install(options.device)
    model, optimizer = make(options.optimizer)
    with contextlib.redirect_stdout(sys.stderr):
        how = with_own_loop if options.loop == "own" else with_trainer
        run, more = how(options, model, optimizer)
    return {
        "digest": digest_of(model, optimizer),
        "step": run.position.step,
        "last": run.last["means"],
        **more,
    }


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3)
    )
    if name == "adafactor":
        return model, torch.optim.Adafactor(model.parameters(), lr=1e-2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if name == "clipped":

        def clip(*_):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        optimizer.register_step_pre_hook(clip)
    return model, optimizer


def samples(num_samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 12, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def with_trainer(options, model, optimizer):
    def loss(model, batch):
        before_forward(options, trainer.run, recorder, is_training=model.training)
        inputs, labels = batch
        outputs = model(inputs)
        correct = (outputs.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(outputs, labels), "accuracy": correct}

    logs = [EventLog(options.events)] if options.events else []
    trainer = unisono.Trainer(model, optimizer, loss, callbacks=logs, **settings(options))
    recorder = Recorder.attach(trainer.run, options.phases)
    trainer.run.state["seen"] = {"of": torch.arange(3), "by": ["all"]}
    train_set, test_set = samples(NUM_SAMPLES * options.repeats, 1), samples(35, 2)
    for part in (1, 2, 3):
        epochs = max(1, options.epochs * part // 3)
        rows = trainer.fit(train_set, batch_size=BATCH_SIZE, epochs=epochs, validate=test_set)
    means = trainer.evaluate(test_set, batch_size=BATCH_SIZE)
    return trainer.run, {"validation": means, "by all": trainer.digest(), "history": list(rows)}


def with_own_loop(options, model, optimizer):
    run = unisono.Run(model, optimizer, **settings(options))
    recorder = Recorder.attach(run, options.phases)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    run.state["schedule"] = schedule
    run.state["sum of losses"] = 0.0
    test_inputs, test_labels = (one.to(run.device.torch) for one in samples(35, 2).tensors)
    train_set = samples(NUM_SAMPLES * options.repeats, 1)
    model.train()
    for step in run.steps(train_set, batch_size=BATCH_SIZE, epochs=options.epochs):
        with step:
            for inputs, labels in step.shards:
                before_forward(options, run, recorder, is_training=True)
                step.backward(F.cross_entropy(model(inputs), labels))
        if not step.is_done:
            continue
        schedule.step()
        run.state["sum of losses"] += step.loss
        if run.position.batch == 0:
            recorder.note("evaluate")
            model.eval()
            with torch.no_grad():
                run.state["validation"] = float(F.cross_entropy(model(test_inputs), test_labels))
            model.train()
    state = {name: value for name, value in run.state.items() if name != "schedule"}
    return run, {"state": state, "lr": schedule.get_last_lr(), "steps": schedule.last_epoch}


def settings(options: Options) -> dict[str, object]:
    checkpoint = unisono.Checkpoint(options.every or None, keep=options.keep)
    return {
        "shards": SHARDS,
        "seed": 5,
        "directory": options.directory or None,
        "checkpoint": checkpoint if options.directory else None,
        "device": options.device,
    }


def before_forward(options, run, recorder, *, is_training):
    """Be slow where that was asked for, and hold where a replacement is to catch up."""
    if not is_training:
        recorder.note("evaluate")
        return
    recorder.note("forward")
    step = run.position.step
    is_slow = options.slow_every and step % options.slow_every == 0
    time.sleep(options.pace_ms * (10 if is_slow else 1) / 1000)
    while options.gate and step == GATE_STEP and not Path(options.gate).exists():
        time.sleep(0.001)
    start_s = time.monotonic()
    while step in options.hold and run._context.team.size < run._context.team.world.world_size:
        if run._context.team.is_stop_requested:
            return
        if time.monotonic() - start_s > NOBODY_COMES_S:
            raise TimeoutError(f"no replacement has caught up in {NOBODY_COMES_S:.0f} s")
        time.sleep(0.001)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = json.loads(sys.argv[1])
    options = Options(**{**given, "hold": tuple(given["hold"])})
    print("result:", json.dumps(train(options)), flush=True)


if __name__ == "__main__":
    main()
