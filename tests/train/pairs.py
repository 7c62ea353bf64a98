"""Programs with several models and optimizers, and plain loops of one process beside them."""

import contextlib
import math
from typing import ClassVar

import torch
from tests.classified import by_sign
from tests.loaders import loader_of
from torch import nn
from torch.nn import functional as F

import unisono
from unisono.plan.seeds import seed_of
from unisono.runtime.device import seed_generators
from unisono.runtime.faults import Fault

BATCH_SIZE, STEPS, SAMPLES = 12, 7, 34  # the third step ends an epoch


class Halving(torch.optim.SGD):
    """No class of torch's own, so it updates whole parameters."""


class Program:
    """Models, optimizers, and by optimizers the loss of each update of a step. Each has its own."""

    options: ClassVar[dict] = {}
    updates: ClassVar[dict] = {}

    def parts(self):
        return {name: model for name, model in vars(self).items() if isinstance(model, nn.Module)}


class Gan(Program):
    options: ClassVar[dict] = {
        "clip_norm": {"discriminator": 0.5},
        "clip_value": {"generator": 0.01},
    }

    def __init__(self):
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.optimizers = {
            "discriminator": torch.optim.Adam(self.discriminator.parameters(), 1e-2),
            "generator": torch.optim.SGD(self.generator.parameters(), 0.1, momentum=0.9),
        }
        self.updates = {("discriminator",): self.of_real, ("generator",): self.of_made_up}
        self.schedules = {
            name: torch.optim.lr_scheduler.StepLR(optimizer, 2 + len(name) % 2, 0.5)
            for name, optimizer in self.optimizers.items()
        }

    def of_real(self, models, batch):
        real, _ = batch
        made_up = models["generator"](torch.randn(len(real), 4)).detach()
        away = F.softplus(-models["discriminator"](real))
        return (away + F.softplus(models["discriminator"](made_up))).mean()

    def of_made_up(self, models, batch):
        made_up = models["generator"](torch.randn(len(batch[0]), 4))
        return F.softplus(-models["discriminator"](made_up)).mean()


class ActorCritic(Program):
    options: ClassVar[dict] = {"clip_norm": {"actor": 0.1, "critic": 0.2}}

    def __init__(self):
        self.trunk = nn.Linear(6, 8)
        self.actor, self.critic = nn.Linear(8, 2), nn.Linear(8, 1)
        self.optimizers = {
            "actor": torch.optim.Adam([*self.trunk.parameters(), *self.actor.parameters()], 1e-2),
            "critic": Halving(self.critic.parameters(), 0.1),
        }
        self.updates = {("actor", "critic"): self.of_both}

    def of_both(self, models, batch):
        states, actions = batch
        seen = torch.tanh(models["trunk"](states))
        value = models["critic"](seen).squeeze(1)
        advantage = states.sum(1) * (2 * actions - 1) - value
        chosen = F.log_softmax(models["actor"](seen), 1).gather(1, actions[:, None]).squeeze(1)
        loss = (advantage.square() - advantage.detach() * chosen).mean()
        return {"loss": loss, "value": value.mean()}


class Distillation(Program):
    """The teacher learns, too; its update comes every second step."""

    def __init__(self):
        self.teacher = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))
        self.student = nn.Linear(6, 2)
        self.optimizers = {
            "teacher": torch.optim.AdamW(self.teacher.parameters(), 1e-2),
            "student": torch.optim.SGD(self.student.parameters(), 0.1),
        }
        self.updates = {("teacher",): self.of_teacher, ("student",): self.of_student}

    def of_teacher(self, models, batch):
        return F.cross_entropy(models["teacher"](batch[0]), batch[1])

    def of_student(self, models, batch):
        wanted = models["teacher"](batch[0]).softmax(1)  # its gradients reach the teacher
        return F.cross_entropy(models["student"](batch[0]), wanted)


class FrozenTeacher(Distillation):
    def __init__(self):
        super().__init__()
        self.teacher.requires_grad_(False).eval()
        self.optimizers = {"student": self.optimizers["student"]}
        self.updates = {("student",): self.of_student}


class Scaled(Distillation):
    @property
    def options(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        return {"scaler": {"teacher": scaler}}


PROGRAMS = {kind.__name__: kind for kind in (Gan, ActorCritic, Distillation, FrozenTeacher, Scaled)}


def made(name):
    torch.manual_seed(3)
    return PROGRAMS[name]()


def data():
    return by_sign(SAMPLES, 6, seed=5)


def due(updates, step):
    return [each for each in updates.items() if step % 2 == 0 or each[0] != ("teacher",)]


def in_one_process(name):
    """Train as people write it; gives the weights and buffers."""
    program, dataset = made(name), data()
    options = program.options
    for step in range(STEPS):
        start = step * BATCH_SIZE % 36
        batch = dataset[start : start + BATCH_SIZE]
        for turn, (names, loss_of) in enumerate(due(program.updates, step)):
            seed_generators(seed_of("train", 0, step, turn))
            for optimizer in program.optimizers.values():
                optimizer.zero_grad()
            loss = loss_of(program.parts(), batch)
            loss = loss["loss"] if isinstance(loss, dict) else loss
            scaler = options.get("scaler", {}).get(names[0])
            (loss if scaler is None else scaler.scale(loss)).backward()
            for each in names:
                optimizer = program.optimizers[each]
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                if each in options.get("clip_norm", {}):
                    nn.utils.clip_grad_norm_(parameters, options["clip_norm"][each])
                if each in options.get("clip_value", {}):
                    nn.utils.clip_grad_value_(parameters, options["clip_value"][each])
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
        for schedule in getattr(program, "schedules", {}).values():
            schedule.step()
    return nn.ModuleDict(program.parts()).state_dict()


def run_of(name, shards=4, **options):
    program = made(name)
    run = unisono.Run(
        program.parts(), program.optimizers, shards=shards, **{**program.options, **options}
    )
    run.state.update(getattr(program, "schedules", {}))
    return program, run


def train(name, **options):
    run = trained(name, **options)
    return run.digest()


def train_with(name, loader_workers, fault=None, marker=None):
    """Train; what is launched takes no keywords."""
    return train(name, loader_workers=loader_workers, fault=fault, marker=marker)


def trained(name, steps=STEPS, shards=4, fault=None, marker=None, loader_workers=0, **options):
    """Train; gives the run.

    `fault`: (place, step, which update) where rank 1 is killed once; `marker` is made then.
    """
    program, run = run_of(name, shards, **options)
    loader = loader_of(data(), BATCH_SIZE, shuffle=False, num_workers=loader_workers)
    for step in run.steps(loader, steps=steps):
        with step:
            for turn, (names, loss_of) in enumerate(due(program.updates, step.number)):
                is_due = fault and fault[1:] == (step.number, turn) and not marker.exists()
                if is_due and run._context.team.world.rank == 1:
                    marker.touch()
                    faults = run._context.team.faults
                    faults._mine = [Fault("kill", 1, step.number, fault[0])]
                    run._context.engine._meet_fault = faults.meet
                together = set(names) == set(program.optimizers)
                with contextlib.nullcontext() if together else step.update(*names):
                    for batch in step.shards:
                        step.backward(loss_of(run.model, batch))
                if not together:
                    assert math.isfinite(step.loss)
            for parameter in run.model.parameters():
                assert parameter.grad is None or len(program.updates) == 1
        if step.is_done:
            for schedule in getattr(program, "schedules", {}).values():
                schedule.step()
    return run
