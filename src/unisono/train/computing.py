"""How are passes through a model computed? What a trainer is told, and what the model is.

Whatever changes bits belongs to the run's identity. With a lower precision torch's autocast runs
the loss function; parameters, gradients, sums and updates stay as they are. Small gradients vanish
in float16, so the loss is scaled up there. A program lays its model out, and compiles it, itself:
kernels add in another order then, so bits change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.device import Device
from unisono.device import grad_scaler as grad_scaler_of_torch
from unisono.train.compiling import compiled_in_this_thread, compiler_of, is_compiled
from unisono.train.tf32 import TF32, tf32_in_words, tf32_switched

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Computing:
    """How passes through a model are computed, in training, evaluation and prediction alike.

    Raises:
        ValueError: there is no such precision.
        TypeError: `tf32` is neither True nor False.
    """

    precision: str  # one of `DTYPES`
    tf32: bool | None  # whether GPUs may round factors to TF32; None: as the program has it

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            raise ValueError(
                f"`precision` must be one of {tuple(DTYPES)}, but is {self.precision!r}."
            )
        if not (self.tf32 is None or isinstance(self.tf32, bool)):
            raise TypeError(f"`tf32` must be True or False, or None, but is {self.tf32!r}.")

    def fixed_by(self, model: nn.Module, device: Device) -> dict[str, Any]:
        """Say what of it changes bits on a device, by name, as plain JSON, for a run's identity."""
        fixed = {
            "precision": self.precision,
            "channels_last": _has_channels_last(model),
            "compile": compiler_of(model, device),
        }
        if self.tf32 is not None and not device.is_host:  # else as `identity` finds it
            fixed[TF32] = tf32_in_words(self.tf32)
        return fixed

    def of(
        self, compute: Callable[[nn.Module, Any], Any], device: Device
    ) -> Callable[[nn.Module, Any], Any]:
        """Have a loss or a forward function computed so."""
        dtype = DTYPES[self.precision]
        if dtype is None:
            return compute

        @functools.wraps(compute)
        def autocast(model: nn.Module, batch: Any) -> Any:
            # One region a shard: what autocast keeps of the weights ends with it.
            with device.autocast(dtype):
                return compute(model, batch)

        return autocast

    def scaler(self, grad_scaler: Any) -> Any:
        """Find what scales the loss: in ``"fp16"`` torch's scaler or the user's, else nothing.

        Raises:
            ValueError: the user's does not fit the precision.
        """
        is_given = isinstance(grad_scaler, torch.amp.GradScaler)
        is_enabled = isinstance(grad_scaler, torch.amp.GradScaler) and grad_scaler.is_enabled()
        if self.precision != "fp16" and is_enabled:
            raise ValueError(
                f'`grad_scaler` must be left out unless `precision="fp16"`, but precision is '
                f"{self.precision!r}: its gradients do not vanish."
            )
        if self.precision == "fp16" and is_given and not is_enabled:
            raise ValueError(
                '`grad_scaler` must be enabled with `precision="fp16"`, but is not: pass '
                '`torch.amp.GradScaler("cpu")`, say, or leave it out.'
            )
        if self.precision == "fp16" and grad_scaler is None:
            return grad_scaler_of_torch()
        return grad_scaler

    @contextmanager
    def under_way(self, model: nn.Module) -> Iterator[None]:
        """Have torch's switches set within a block, and put back after it."""
        compiles = is_compiled(model)
        with tf32_switched(self.tf32), compiled_in_this_thread() if compiles else nullcontext():
            yield


def _has_channels_last(model: nn.Module) -> bool:
    """Tell whether a program has laid images out so, with ``model.to(memory_format=…)``."""
    layout = torch.channels_last
    return any(
        parameter.is_contiguous(memory_format=layout) and not parameter.is_contiguous()
        for parameter in model.parameters()
        if parameter.dim() == 4
    )
