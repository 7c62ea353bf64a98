"""Forward passes, compiled by torch so that bits do not depend on who computes which shard.

torch compiles for the first shape that it sees, then anew for shapes of any size, and after some
times no more. What a shard is computed by would then depend on what this worker has computed
before. So every shape is compiled for itself, and where that has no end it is an error. Programs
have their models compiled as torch says, by ``model.compile()`` or ``torch.compile``.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from unisono.device import Device

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
