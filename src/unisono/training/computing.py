"""How are passes through a model computed? What a trainer is told, and what the model is.

With a lower precision torch's autocast runs the loss function; parameters, gradients, sums and
updates stay as they are. A program lays its model out, and compiles it, itself.

torch compiles for the first shape that it sees, then anew for shapes of any size, and after some
times no more. What a shard is computed by would then depend on what this worker has computed
before. So every shape is compiled for itself, and where that has no end it is an error.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from unisono.runtime.device import Device, flushes_denormals
from unisono.runtime.device import grad_scaler as grad_scaler_of_torch
from unisono.training.options import DTYPES, Precision


@dataclass(frozen=True, slots=True)
class Computing:
    """How passes through a model are computed, in training, evaluation and prediction alike."""

    precision: Precision

    def fixed_by(self, model: nn.Module, device: Device) -> dict[str, Any]:
        """Return what of it changes bits on a device, by name, as JSON, for a run's identity."""
        return {
            "precision": self.precision.name,
            "channels_last": _has_channels_last(model),
            "compile": compiler_of(model, device),
        }

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

    def under_way(self, model: nn.Module) -> AbstractContextManager[None]:
        """Have torch's switches set within a block, and put back after it."""
        if not is_compiled(model):
            return nullcontext()
        # torch starts no threads to compile: they would stay, and other cores have workers.
        alone: AbstractContextManager[None] = torch._inductor.config.patch(compile_threads=1)
        return alone


def _has_channels_last(model: nn.Module) -> bool:
    """Return whether a program has laid images out so, with ``model.to(memory_format=…)``."""
    layout = torch.channels_last
    return any(
        parameter.is_contiguous(memory_format=layout) and not parameter.is_contiguous()
        for parameter in model.parameters()
        if parameter.dim() == 4
    )


_SHAPES_AT_MOST = 256


def is_compiled(model: nn.Module) -> bool:
    """Return whether a program has had a model's forward pass, or a part of it, compiled."""
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def compiler_of(model: nn.Module, device: Device) -> str | None:
    """Name what torch compiles a model with, ``""`` if it cannot; None if it is not compiled."""
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


def tf32_in_words() -> str:
    """Name what float32 computations of an accelerator may be in TF32, for a run's identity."""
    backends: Any = torch.backends
    switches = {
        "products": backends.cuda.matmul,
        "convolutions": backends.cudnn.conv,
        "recurrent layers": backends.cudnn.rnn,
    }
    return ", ".join(n for n, one in switches.items() if one.fp32_precision == "tf32") or "off"


def arithmetic_in_words() -> str:
    """Describe what a program has switched of torch's arithmetic, for a run's identity."""
    backends: Any = torch.backends
    onednn = backends.mkldnn
    switches = {
        "products": onednn.matmul,
        "convolutions": onednn.conv,
        "recurrent layers": onednn.rnn,
    }
    precisions = {name: one.fp32_precision for name, one in switches.items()}
    said = [f"{name} in {kind}" for name, kind in precisions.items() if kind in ("bf16", "tf32")]
    said += [] if onednn.enabled else ["without oneDNN"]
    said += ["denormal numbers as 0"] if flushes_denormals() else []
    # The switch has another device's name, but is the CPU's, too.
    said += [] if backends.cuda.flash_sdp_enabled() else ["attention without flash kernels"]
    said += [] if backends.mha.get_fastpath_enabled() else ["attention without its fast path"]
    return ", ".join(said) or "as usual"


@contextmanager
def deterministic_kernels(is_needed: bool) -> Iterator[None]:
    """Have torch choose deterministic kernels within a block, and refuse operations without one.

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
