"""The arguments that `Run` and `Trainer` have in common: their defaults, and what each may be.

When a checkpoint is due: a pure function of steps, epochs and the clock.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from unisono.engine.exchange.choice import check_exchange
from unisono.engine.state.optimizers import needs_closure, takes_closure
from unisono.engine.step.transforms import Clipping, OnGradients
from unisono.plan.samples import NUM_SEEDS
from unisono.runtime.device import AUTO
from unisono.runtime.whole import check_whole
from unisono.training.loss_function import check_function

RESUME = ("auto", "never")
PER_OPTIMIZER = ("clip_norm", "clip_value", "grad_scaler")  # one for all, or by name
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run computes and where it is kept; :class:`unisono.Run` documents each.

    Attributes:
        every: what follows from `checkpoint_every`.

    Raises:
        TypeError: an option is of the wrong kind.
        ValueError: an option does not fit; the message says what to do.
    """

    shards: int | None = None
    seed: int = 0
    directory: str | os.PathLike[str] | None = None
    checkpoint_every: int | str | None = None
    keep: int = 3
    resume: str = "auto"
    resume_options: str = "checkpoint"
    clip_norm: float | Mapping[str, float] | None = None
    clip_value: float | Mapping[str, float] | None = None
    grad_scaler: torch.amp.GradScaler | Mapping[str, torch.amp.GradScaler] | None = None
    device: str | torch.device = AUTO
    exchange: str = AUTO
    exact: bool = True
    on_gradients: OnGradients | None = None
    closure: bool | None = None
    every: Every | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name in {name for each in (self.clip_norm, self.clip_value) for name in _names(each)}:
            self.clipping_of(name)
        if self.shards is not None:
            self._set("shards", check_whole("shards", self.shards, at_least=1))
        if not isinstance(self.exact, bool):
            raise TypeError(f"`exact` must be True or False, but is {self.exact!r}.")
        self._set("seed", check_whole("seed", self.seed, at_least=0, below=NUM_SEEDS))
        if self.directory is not None:
            self._set("keep", check_whole("keep", self.keep, at_least=1))
            if self.resume not in RESUME:
                raise ValueError(f"`resume` must be one of {RESUME}, but is {self.resume!r}.")
        check_exchange(self.exchange)
        if self.on_gradients is not None:
            check_function("on_gradients", self.on_gradients, ("step", "gradients"))
        if self.closure not in (None, True, False):
            raise TypeError(f"`closure` must be True, False or None, but is {self.closure!r}.")
        if self.checkpoint_every is not None:
            if self.directory is None:
                raise ValueError(
                    "`directory` must say where checkpoints go when `checkpoint_every` is given, "
                    'but is None: pass `directory="runs/mnist"`, say.'
                )
            self._set("every", Every.read(self.checkpoint_every))

    @classmethod
    def among(cls, arguments: Mapping[str, Any], **others: Any) -> RunOptions:
        """Take the options out of a function's arguments; `others` replace some of them."""
        names = [option.name for option in fields(cls) if option.init]
        return cls(**{name: arguments[name] for name in names} | others)

    def clipping_of(self, name: str) -> Clipping:
        """Say how the gradients of an optimizer are clipped; raises what :class:`Clipping` does."""
        return Clipping(_of(self.clip_norm, name), _of(self.clip_value, name))

    def scaler_of(self, name: str) -> torch.amp.GradScaler | None:
        """Give the scaler of an optimizer's losses, if it has one."""
        return _of(self.grad_scaler, name)

    def takes_closure(self, optimizer: Optimizer) -> bool:
        """Tell whether the optimizer is called with a closure."""
        return needs_closure(optimizer) if self.closure is None else self.closure

    def replicas_for(self, optimizer: Optimizer) -> str:
        """Name the option for which every worker must have a replica; empty: none."""
        if self.on_gradients is not None:
            return "on_gradients"
        return "closure" if self.takes_closure(optimizer) else ""

    def check_closure(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that does not fit `closure`, and what does not go with one.

        Raises:
            ValueError: something does not fit.
        """
        name = type(optimizer).__name__
        if self.closure is False and needs_closure(optimizer):
            raise ValueError(
                f"`closure` must be left out for {name}, whose `step` asks for one, but is False."
            )
        if not self.takes_closure(optimizer):
            return
        if not takes_closure(optimizer):
            raise ValueError(
                f"`closure=True` must have an optimizer whose `step` takes a closure, but that of "
                f"{name} does not: leave it out."
            )
        if self.grad_scaler is not None:
            raise ValueError(
                f"an optimizer that asks for the loss again ({name}) must do without "
                f"`grad_scaler`, but it is given: leave it out."
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _of(given: T | Mapping[str, T] | None, name: str) -> T | None:
    """Give an option's value for one optimizer, where it may be by name."""
    return given.get(name) if isinstance(given, Mapping) else given


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
    def read(cls, text: int | str, name: str = "checkpoint_every") -> Every:
        """Understand ``500``, ``"500 steps"``, ``"1 epoch"``, ``"10min"``, ``"90 s"``, ``"2h"``.

        Raises:
            ValueError: it is none of these, or not above 0.
        """
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
            f'"1 epoch" or "10min", but is {text!r}.'
        )

    def is_due(self, *, steps: int, epoch_ended: int, seconds: float) -> bool:
        """Tell whether a checkpoint is due.

        Args:
            steps: steps done over the whole run.
            epoch_ended: how many epochs are done if one has just ended, else 0.
            seconds: since the last checkpoint, or since the beginning.
        """
        if self.steps is not None:
            return steps % self.steps == 0
        if self.epochs is not None:
            return epoch_ended > 0 and epoch_ended % self.epochs == 0
        return self.seconds is not None and seconds >= self.seconds
