"""How are passes through a model computed? What a trainer is told, and what the model is.

Whatever changes bits belongs to the run's identity. With a lower precision torch's autocast runs
the loss function; parameters, gradients, sums and updates stay as they are. Small gradients vanish
in float16, so the loss is scaled up there. A program lays its model out, and compiles it, itself:
kernels add in another order then, so bits change.

Forward passes, compiled by torch so that bits do not depend on who computes which shard.

torch compiles for the first shape that it sees, then anew for shapes of any size, and after some
times no more. What a shard is computed by would then depend on what this worker has computed
before. So every shape is compiled for itself, and where that has no end it is an error. Programs
have their models compiled as torch says, by ``model.compile()`` or ``torch.compile``.

May GPUs round the factors of float32 products to TF32? Switched for a time, then put back.

torch has two sets of switches that must agree, and complains when one is read after the other was
set. Those for GPUs are set here by their old names, which set the new ones too; each value that
this or the putting back changes on the way is put back. Nothing of what is switched is looked at by
computations on the CPU.

Deterministic kernels on accelerators: torch's switches are set for a time, then put back.

On the CPU torch's kernels are deterministic as they are, so nothing is touched there.
"""

from __future__ import annotations

import functools
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from unisono.runtime.device import Device
from unisono.runtime.device import grad_scaler as grad_scaler_of_torch
from unisono.training.options import DTYPES, Precision


@dataclass(frozen=True, slots=True)
class Computing:
    """How passes through a model are computed, in training, evaluation and prediction alike."""

    precision: Precision

    def fixed_by(self, model: nn.Module, device: Device) -> dict[str, Any]:
        """Say what of it changes bits on a device, by name, as plain JSON, for a run's identity."""
        fixed = {
            "precision": self.precision.name,
            "channels_last": _has_channels_last(model),
            "compile": compiler_of(model, device),
        }
        if self.precision.tf32 is not None and not device.is_host:  # else as `identity` finds it
            fixed[TF32] = tf32_in_words(self.precision.tf32)
        return fixed

    def of(
        self, compute: Callable[[nn.Module, Any], Any], device: Device
    ) -> Callable[[nn.Module, Any], Any]:
        """Have a loss or a forward function computed so."""
        dtype = DTYPES[self.precision.name]
        if dtype is None:
            return compute

        @functools.wraps(compute)
        def autocast(model: nn.Module, batch: Any) -> Any:
            # One region a shard: what autocast keeps of the weights ends with it.
            with device.autocast(dtype):
                return compute(model, batch)

        return autocast

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Find what scales the loss: in ``"fp16"`` torch's scaler or the user's, else nothing."""
        if self.precision.name == "fp16" and self.precision.scaler is None:
            return grad_scaler_of_torch()
        return self.precision.scaler

    @contextmanager
    def under_way(self, model: nn.Module) -> Iterator[None]:
        """Have torch's switches set within a block, and put back after it."""
        compiles = compiled_in_this_thread() if is_compiled(model) else nullcontext()
        with tf32_switched(self.precision.tf32), compiles:
            yield


def _has_channels_last(model: nn.Module) -> bool:
    """Tell whether a program has laid images out so, with ``model.to(memory_format=…)``."""
    layout = torch.channels_last
    return any(
        parameter.is_contiguous(memory_format=layout) and not parameter.is_contiguous()
        for parameter in model.parameters()
        if parameter.dim() == 4
    )


_SHAPES_AT_MOST = 256


def is_compiled(model: nn.Module) -> bool:
    """Tell whether a program has had a model's forward pass, or a part of it, compiled."""
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def compiler_of(model: nn.Module, device: Device) -> str | None:
    """Say what torch compiles a model with: on the CPU a C++ compiler, else Triton.

    Returns:
        None if it is not compiled; ``""`` if there is no compiler, of which torch will tell.
    """
    if not is_compiled(model):
        return None
    try:
        if not device.is_host:
            return f"Triton {version('triton')}"
        command = [os.environ.get("CXX", "g++"), "--version"]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    except (PackageNotFoundError, OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.partition("\n")[0]


@contextmanager
def every_shape_compiled() -> Iterator[None]:
    """Have torch compile anew for each shape within a block, or raise an error."""
    limits = {
        "automatic_dynamic_shapes": False,
        "recompile_limit": _SHAPES_AT_MOST,
        "accumulated_recompile_limit": 64 * _SHAPES_AT_MOST,
        "fail_on_recompile_limit_hit": True,
    }
    with torch._dynamo.config.patch(limits):
        yield


@contextmanager
def compiled_in_this_thread() -> Iterator[None]:
    """Have torch start no threads to compile: they would stay, and other cores have workers."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


TF32 = "tf32"
"""Its name in the identity of a run."""


def tf32_in_words(tf32: bool | None) -> str:
    """Say what :func:`tf32_switched` leads to, for the identity of a run on an accelerator."""
    names = ("products", "convolutions", "recurrent layers")
    if tf32 is None:
        is_on = [switch.fp32_precision == "tf32" for switch in _new_switches()[: len(names)]]
    else:
        is_on = [tf32] * len(names)
    return ", ".join(name for name, there in zip(names, is_on, strict=True) if there) or "off"


@contextmanager
def tf32_switched(tf32: bool | None) -> Iterator[None]:
    """Allow or forbid TF32 within a block; None: leave it as it is."""
    if tf32 is None:
        yield
        return
    news = _new_switches()
    new_values = [switch.fp32_precision for switch in news]
    old_values = _old_values()
    if old_values is not None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    for switch in news[:3]:
        switch.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        if old_values is not None:
            product, torch.backends.cudnn.allow_tf32 = old_values
            torch.set_float32_matmul_precision(product)
        for switch, value in zip(news, new_values, strict=True):
            switch.fp32_precision = value


def _new_switches() -> list[Any]:
    """List the new switches: three for GPUs, and one that the old way of putting back changes."""
    backends: Any = torch.backends
    return [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
    ]


def _old_values() -> tuple[str, bool] | None:
    """Read the old switches; None where the new ones have been set to something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have the new ones read
        try:
            return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        except RuntimeError:
            return None


@contextmanager
def deterministic_kernels(is_needed: bool) -> Iterator[None]:
    """Have torch choose deterministic kernels within a block, and refuse operations without one.

    Args:
        is_needed: whether to touch anything: the device is an accelerator, and the run is exact.

    cuDNN chooses its kernels without trying which is the fastest, as that may differ from one
    process to the next. Memory that nobody has written is not filled: that takes time, and no
    result may depend on it.
    """
    if not is_needed:
        yield
        return
    inductor: Any = torch._inductor.config  # which torch's own switch sets, too, in newer versions
    memory: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    compiled = getattr(inductor, "deterministic", None)
    fills = memory.fill_uninitialized_memory
    tries, repeats = cudnn.benchmark, cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        if compiled is not None:
            inductor.deterministic = compiled
        memory.fill_uninitialized_memory = fills
        cudnn.benchmark, cudnn.deterministic = tries, repeats
