"""How are passes through a model computed? According to a trainer's options and to the model.

With a lower precision, torch's autocast runs the loss function; parameters, gradients, sums and
updates keep their dtype. A program sets the memory format of its model, and compiles it, itself.

torch compiles for the first shape that it sees, then once for shapes of any size, and after some
recompilations no more. The kernels of a shard would then depend on what this worker computed
before. So every shape is compiled separately, and too many shapes are an error.
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
    """How passes through a model are computed in training, evaluation and prediction."""

    precision: Precision

    def fixed_by(self, model: nn.Module, device: Device) -> dict[str, Any]:
        """Return the settings that change bits on a device, as JSON, for a run's identity."""
        return {
            "precision": self.precision.name,
            "channels_last": _has_channels_last(model),
            "compile": compiler_of(model, device),
        }

    def of(
        self, compute: Callable[[nn.Module, Any], Any], device: Device
    ) -> Callable[[nn.Module, Any], Any]:
        """Return a loss or forward function that computes in this precision."""
        dtype = DTYPES[self.precision.name]
        if dtype is None:
            return compute

        @functools.wraps(compute)
        def autocast(model: nn.Module, batch: Any) -> Any:
            # One region per shard: autocast's cache of weights ends with it.
            with device.autocast(dtype):
                return compute(model, batch)

        return autocast

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return what scales the loss: with ``"fp16"`` torch's scaler or the user's, else None."""
        if self.precision.name == "fp16" and self.precision.scaler is None:
            return grad_scaler_of_torch()
        return self.precision.scaler

    def under_way(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which torch compiles the model as workers should."""
        if not is_compiled(model):
            return nullcontext()
        # Threads that compile would stay, and the other cores have workers.
        alone: AbstractContextManager[None] = torch._inductor.config.patch(compile_threads=1)
        return alone


def _has_channels_last(model: nn.Module) -> bool:
    """Return whether a program has called ``model.to(memory_format=torch.channels_last)``."""
    layout = torch.channels_last
    return any(
        parameter.is_contiguous(memory_format=layout) and not parameter.is_contiguous()
        for parameter in model.parameters()
        if parameter.dim() == 4
    )


_SHAPES_AT_MOST = 256


def is_compiled(model: nn.Module) -> bool:
    """Return whether a program has compiled a model's forward pass, or a part of it."""
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def compiler_of(model: nn.Module, device: Device) -> str | None:
    """Return the compiler of a model's kernels, ``""`` if unknown; None if it is not compiled."""
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
    """Make torch compile each shape separately within a block, or raise an error."""
    limits = {
        "automatic_dynamic_shapes": False,
        "recompile_limit": _SHAPES_AT_MOST,
        "accumulated_recompile_limit": 64 * _SHAPES_AT_MOST,
        "fail_on_recompile_limit_hit": True,
    }
    with torch._dynamo.config.patch(limits):
        yield


def tf32_in_words() -> str:
    """Return which float32 computations of an accelerator may use TF32, for a run's identity."""
    backends: Any = torch.backends
    switches = {
        "products": backends.cuda.matmul,
        "convolutions": backends.cudnn.conv,
        "recurrent layers": backends.cudnn.rnn,
    }
    return ", ".join(n for n, one in switches.items() if one.fp32_precision == "tf32") or "off"


def arithmetic_in_words() -> str:
    """Return which switches of torch's arithmetic a program has changed, for a run's identity."""
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
    said += [] if torch._C._get_nnpack_enabled() else ["without NNPACK"]
    said += ["denormal numbers as 0"] if flushes_denormals() else []
    # The switch is named after another device, but the CPU obeys it as well.
    said += [] if backends.cuda.flash_sdp_enabled() else ["attention without flash kernels"]
    said += [] if backends.mha.get_fastpath_enabled() else ["attention without its fast path"]
    return ", ".join(said) or "as usual"


@contextmanager
def deterministic_kernels(is_needed: bool) -> Iterator[None]:
    """Make torch choose deterministic kernels within a block, and refuse operations without one.

    cuDNN chooses kernels without timing them, as the fastest may differ between processes.
    Uninitialized memory is not filled: that takes time, and no result may depend on it.
    """
    if not is_needed:
        yield
        return
    inductor: Any = torch._inductor.config  # newer torch versions set it as well
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
