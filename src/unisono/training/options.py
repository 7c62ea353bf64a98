"""The options of a run: those of `Run` and `Trainer`, grouped where they belong together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unisono.engine.step.transforms import Clipping, OnGradients
from unisono.plan.samples import NUM_SEEDS
from unisono.runtime.device import AUTO
from unisono.runtime.habits import class_habits_met
from unisono.runtime.plainfile import check_path
from unisono.runtime.whole import check_flag, check_whole
from unisono.training.loss_function import check_function

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
INTERVALS = ("step", "epoch")
LOSS = "loss"
RESUME = ("auto", "never")
OF_CHECKPOINT, OF_PROGRAM = TAKEN_FROM = ("checkpoint", "program")
PER_OPTIMIZER = ("clip_norm", "clip_value", "scaler")  # one for all, or one by name
T = TypeVar("T")

Scaler = torch.amp.GradScaler

THINGS = {
    "buffers": "`buffers`, which shards combine",
    "closure": "an optimizer whose `step` requires a closure",
    "compiled": "a compiled model",
    "device": "`device`",
    "one_loss": "one loss for several optimizers",
    "scaler": "a scaler of the loss",
    "several": "several optimizers",
    "split": "a split model",
    "whole_batch": "a loss over the whole batch",
}
# Those that cannot be combined: why, and what to do.
CONFLICTS = {
    ("buffers", "closure"): "a closure changes buffers in each evaluation: leave `buffers` out",
    ("closure", "scaler"): "a step that overflows could not be skipped during a closure: "
    'leave out `scaler` and the precision "fp16"',
    ("closure", "several"): "one closure is for one optimizer: make a run with that one alone",
    ("closure", "whole_batch"): "such a loss is computed once a step: take another optimizer",
    ("one_loss", "scaler"): "losses are scaled for one optimizer at a time: leave `scaler` and the "
    'precision "fp16" out, or use `unisono.Run`, whose steps have `step.update(name)`',
    ("split", "device"): "it is computed where it was split to: leave `device` out, or split the "
    "model over other devices",
    ("split", "compiled"): "its activations go from device to device in Python: leave "
    "`model.compile()` out",
}


@final
@class_habits_met('Precision("bf16")')
@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of a trainer's passes: ``precision=Precision("fp16", exact=False)``.

    Args:
        name: ``"fp32"``: no autocast; ``"bf16"``, ``"fp16"``: torch's autocast around the loss
            function, and for ``"fp16"`` a scaled loss. A step whose gradients overflow is skipped
            on all workers; it counts as a step, and the schedule steps.
        scaler: scales the loss with ``"fp16"``; None: ``torch.amp.GradScaler("cpu")``.
        exact: whether results on an accelerator have the same bits in every run: torch then uses
            deterministic kernels in this trainer's computations, and an operation without one
            raises :class:`unisono.errors.NondeterministicError`. False: the program's settings
            apply. No effect on the CPU.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such precision, or the scaler does not match it.
    """

    name: str = "fp32"
    scaler: Scaler | None = field(default=None, kw_only=True)
    exact: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.name not in DTYPES:
            bits = next((one for one in _BITS if one in str(self.name).lower()), "")
            raise ValueError(
                f"`precision` must be one of {tuple(DTYPES)}, but is {self.name!r}: pass "
                f'`precision="{_BITS.get(bits, "bf16")}"`, for example.'
            )
        check_flag("exact", self.exact)
        is_given = isinstance(self.scaler, Scaler)
        is_enabled = isinstance(self.scaler, Scaler) and self.scaler.is_enabled()
        if self.name != "fp16" and is_enabled:
            raise ValueError(
                f'`scaler` must be left out unless the precision is "fp16", but that is '
                f"{self.name!r}: its gradients do not vanish."
            )
        if self.name == "fp16" and is_given and not is_enabled:
            raise ValueError(
                '`scaler` must be enabled with the precision "fp16", but is not: pass '
                '`torch.amp.GradScaler("cpu")`, for example, or leave it out.'
            )


@final
@class_habits_met('Schedule(scheduler, every="step")')
@dataclass(frozen=True, slots=True)
class Schedule:
    """When a learning rate schedule steps: ``schedule=Schedule(cosine, every="step")``.

    Args:
        scheduler: one of ``torch.optim.lr_scheduler`` over the trainer's optimizer; it is saved
            with the run.
        every: ``"epoch"`` or ``"step"``: when it steps. ReduceLROnPlateau steps after each
            validation. A line before the first step warns if a schedule seems to count the other
            unit; a OneCycleLR that would end before `fit` does is refused.
        monitor: the name of the validation mean that ReduceLROnPlateau watches.

    Raises:
        TypeError: `scheduler` is not one of torch's.
        ValueError: `every` is something else, or an argument does not match the scheduler.
    """

    scheduler: LRScheduler
    every: str = field(default="epoch", kw_only=True)
    monitor: str = field(default=LOSS, kw_only=True)

    def __post_init__(self) -> None:
        scheduler = self.scheduler
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"`schedule` must be one of torch.optim.lr_scheduler, but is of type "
                f"{type(scheduler).__name__}: pass `CosineAnnealingLR(optimizer, T_max=30)`, or "
                f'`unisono.Schedule(scheduler, every="step")`.'
            )
        _check_among("every", self.every, INTERVALS)
        looks_at_means = isinstance(scheduler, ReduceLROnPlateau)
        if looks_at_means and self.every != "epoch":
            raise ValueError(
                "ReduceLROnPlateau steps after each validation, so `every` must be left out, but "
                f"is {self.every!r}: say when to validate with `validate_every`."
            )
        if self.monitor != LOSS and not looks_at_means:
            raise ValueError(
                f"`monitor` is what ReduceLROnPlateau looks at, but is {self.monitor!r} without "
                f"one: leave it out."
            )
        if self.monitor == LOSS and getattr(scheduler, "mode", "min") == "max":
            raise ValueError(
                'ReduceLROnPlateau with `mode="max"` must monitor a value that should grow, but '
                'monitors the loss: pass `Schedule(scheduler, monitor="accuracy")`, for example.'
            )


# What precisions are called elsewhere, by a part of the name; the longest parts come first.
_BITS = {"bf": "bf16", "16": "fp16", "half": "fp16", "32": "fp32", "float": "fp32"}


@final
@class_habits_met('Checkpoint("10min", keep=3)')
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """When a run is saved and where it resumes: ``checkpoint=Checkpoint("10min", keep=9)``.

    A checkpoint is always written when a `fit` ends, or a custom loop.

    Args:
        every: the interval, such as ``500`` (steps), ``"1 epoch"`` or ``"10min"``; None: only at
            the end.
        keep: number of checkpoints to keep.
        resume: ``"auto"``: the first loop resumes from the newest complete checkpoint;
            ``"never"``: it starts from the beginning.
        options: what a resumed run does if the optimizer or a schedule now has other options, or
            other parameters are frozen. Each change is reported. ``"checkpoint"``: the run keeps
            the options that it began with; ``"program"``: it takes the new ones, and a schedule
            continues as if it had always had them. A run that resumes between two epochs then also
            accepts a dataset of another length, such as one that has grown, and another
            `batch_size`, `shuffle` and `sampler`.

    Raises:
        TypeError: `keep` is not an integer.
        ValueError: an argument is not valid; the message says what to do.
    """

    every: int | str | None = None
    keep: int = field(default=3, kw_only=True)
    resume: str = field(default="auto", kw_only=True)
    options: str = field(default=OF_CHECKPOINT, kw_only=True)

    def __post_init__(self) -> None:
        if self.every is not None:
            Every.read(self.every)
        _make_whole(self, "keep", at_least=1)
        if self.resume not in RESUME:
            raise ValueError(
                f"`resume` must be one of {RESUME}, but is {self.resume!r}: a run resumes from its "
                f"`directory` by itself; to start from other weights, call `unisono.load_weights`."
            )
        _check_among("options", self.options, TAKEN_FROM)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run computes and where it is saved; :class:`unisono.Run` documents each option."""

    shards: int | None = None
    seed: int = 0
    device: str | torch.device = AUTO
    exact: bool = True
    scaler: Scaler | Mapping[str, Scaler] | None = None
    clip_norm: float | Mapping[str, float] | None = None
    clip_value: float | Mapping[str, float] | None = None
    on_gradients: OnGradients | None = None
    buffers: Mapping[str, str] | None = None
    directory: str | os.PathLike[str] | None = None
    checkpoint: int | str | Checkpoint | None = None

    def __post_init__(self) -> None:
        for name in {name for each in (self.clip_norm, self.clip_value) for name in _names(each)}:
            self.clipping_of(name)
        if self.shards is not None:
            _make_whole(self, "shards", at_least=1)
        _make_whole(self, "seed", at_least=0, below=NUM_SEEDS)
        check_flag("exact", self.exact)
        if self.on_gradients is not None:
            check_function("on_gradients", self.on_gradients, ("step", "gradients"))
        if self.buffers is not None and not isinstance(self.buffers, Mapping):
            raise TypeError(
                f"`buffers` must be a dict of words by the names of buffers, but is of type "
                f'{type(self.buffers).__name__}: pass `buffers={{"*.counts": "sum"}}`, for example.'
            )
        if self.checkpoint is not None and self.directory is None:
            raise ValueError(
                "`directory` must say where checkpoints go when `checkpoint` is given, but is "
                'None: pass `directory="runs/mnist"`, for example.'
            )
        if self.directory is not None:
            check_path("directory", self.directory)
        if self.directory is not None and not os.fspath(self.directory):
            raise ValueError(
                "`directory` must name a folder, but is empty, perhaps from an unset variable: "
                'pass `directory="."` for the working folder, or leave it out.'
            )
        _ = self.saving  # raises for invalid options

    @property
    def saving(self) -> Checkpoint:
        """When the run is saved, and where it resumes."""
        given = self.checkpoint
        return given if isinstance(given, Checkpoint) else Checkpoint(given)

    def clipping_of(self, name: str) -> Clipping:
        """Return how an optimizer's gradients are clipped; raises what :class:`Clipping` does."""
        return Clipping(_of(self.clip_norm, name), _of(self.clip_value, name))

    def scaler_of(self, name: str) -> Scaler | None:
        """Return the scaler of an optimizer's losses, or None."""
        return _of(self.scaler, name)


def check_together(**has: bool) -> None:
    """Raise ValueError for two of :data:`THINGS` that cannot be combined."""
    for (one, other), why in CONFLICTS.items():
        if has.get(one) and has.get(other):
            raise ValueError(f"{THINGS[one]} cannot be combined with {THINGS[other]}: {why}.")


def _of(given: T | Mapping[str, T] | None, name: str) -> T | None:
    """Return the value of an option, which may be given by name, for one optimizer."""
    return given.get(name) if isinstance(given, Mapping) else given


def _make_whole(options: Any, name: str, *, at_least: int, below: int | None = None) -> None:
    """Store a number of frozen options as an int; raises as :func:`check_whole` does."""
    whole = check_whole(name, getattr(options, name), at_least=at_least, below=below)
    object.__setattr__(options, name, whole)


def _check_among(name: str, value: Any, among: Sequence[str]) -> None:
    if value not in among:
        raise ValueError(f"`{name}` must be one of {among}, but is {value!r}.")


def _names(given: Any) -> Sequence[str]:
    return list(given) if isinstance(given, Mapping) else [""]


_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "hour": 3600.0}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s??\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Every:
    """An interval in steps, epochs or seconds; exactly one of them is not None."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    @classmethod
    def read(cls, text: int | str, name: str = "checkpoint") -> Every:
        """Parse ``500``, ``"500 steps"``, ``"1 epoch"``, ``"10min"``, ``"90 s"`` or ``"2h"``."""
        match = _FORM.fullmatch(f"{text} steps" if isinstance(text, int) else str(text))
        unit = match[2].lower() if match else ""
        if match and float(match[1]) > 0:
            if unit in ("step", "epoch") and float(match[1]).is_integer():
                count = int(float(match[1]))
                return cls(steps=count) if unit == "step" else cls(epochs=count)
            if unit in _UNITS_S:
                return cls(seconds=float(match[1]) * _UNITS_S[unit])
        raise ValueError(
            f'`{name}` must be a number of steps, or a text like "500 steps", '
            f'"1 epoch" or "10min", but is {text!r}: pass `{name}="1 epoch"`, for example.'
        )

    def is_due(self, *, steps: int, epoch_ended: int, seconds: float) -> bool:
        """Return whether it is due after `steps`, an epoch that ended (or 0), and `seconds`."""
        if self.steps is not None:
            return steps % self.steps == 0
        if self.epochs is not None:
            return epoch_ended > 0 and epoch_ended % self.epochs == 0
        return self.seconds is not None and seconds >= self.seconds
