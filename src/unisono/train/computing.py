"""How are passes through a model computed? Precision, layout, compilation: what a trainer is told.

Whatever changes bits belongs to the run's identity. With a lower precision torch's autocast runs
the loss function; parameters, gradients, sums and updates stay as they are. Small gradients vanish
in float16, so the loss is scaled up there.
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
from unisono.train.channels import lay_out_channels_last, with_channels_last
from unisono.train.compiling import compile_forward, compiled_in_this_thread, find_compiler
from unisono.train.tf32 import TF32, tf32_in_words, tf32_switched

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Computing:
    """How passes through a model are computed, in training, evaluation and prediction alike.

    Raises:
        ValueError: there is no such precision.
        TypeError: a switch is neither True nor False.
    """

    precision: str  # one of `DTYPES`
    channels_last: bool  # whether images have their channels last in memory
    tf32: bool | None  # whether GPUs may round factors to TF32; None: as the program has it
    compile: bool  # whether the model's forward pass is compiled

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            raise ValueError(
                f"`precision` must be one of {tuple(DTYPES)}, but is {self.precision!r}."
            )
        for name, value, others in (
            ("channels_last", self.channels_last, ""),
            ("tf32", self.tf32, ", or None"),
            ("compile", self.compile, ""),
        ):
            if not isinstance(value, bool) and not (others and value is None):
                raise TypeError(f"`{name}` must be True or False{others}, but is {value!r}.")

    def fixed_on(self, device: Device) -> dict[str, Any]:
        """Say what of it changes bits on a device, by name, as plain JSON, for a run's identity.

        Raises:
            ValueError: there is nothing to compile with.
        """
        fixed = {
            "precision": self.precision,
            "channels_last": self.channels_last,
            "compile": find_compiler(device) if self.compile else None,
        }
        if self.tf32 is not None and not device.is_host:  # else as `identity` finds it
            fixed[TF32] = tf32_in_words(self.tf32)
        return fixed

    def prepare(self, model: nn.Module) -> None:
        """Do to a model what is done once.

        Raises:
            ValueError: it cannot be computed so.
        """
        if self.channels_last:
            lay_out_channels_last(model)
        if self.compile:
            compile_forward(model)

    def of(
        self, compute: Callable[[nn.Module, Any], Any], device: Device
    ) -> Callable[[nn.Module, Any], Any]:
        """Have a loss or a forward function computed so."""
        if self.channels_last:
            compute = with_channels_last(compute)
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
    def under_way(self) -> Iterator[None]:
        """Have torch's switches set within a block, and put back after it."""
        with tf32_switched(self.tf32), compiled_in_this_thread() if self.compile else nullcontext():
            yield
