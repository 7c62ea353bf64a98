"""Forward passes, compiled by torch so that bits do not depend on who computes which shard.

torch compiles for the first shape that it sees, then anew for shapes of any size, and after some
times no more. What a shard is computed by would then depend on what this worker has computed
before. So every shape is compiled for itself, and where that has no end it is an error; whether a
run compiles the model or the program has done so.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from unisono.device import Device

_SHAPES_AT_MOST = 256


def find_compiler(device: Device) -> str:
    """Find what torch compiles with, and say which it is: on the CPU a C++ compiler, else Triton.

    Raises:
        ValueError: there is none.
    """
    if not device.is_host:
        try:
            return f"Triton {version('triton')}"
        except PackageNotFoundError:
            raise ValueError(
                "`compile=True` needs Triton on an accelerator, but it is not installed: run "
                "`pip install triton`, or leave `compile` out."
            ) from None
    name = os.environ.get("CXX", "g++")
    try:
        told = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(
            f"`compile=True` needs a C++ compiler on the CPU, but there is no `{name}`: install "
            f"g++, say where one is with the variable CXX, or leave `compile` out."
        ) from None
    return told.stdout.partition("\n")[0]


def compile_forward(model: nn.Module) -> None:
    """Have a model's forward pass compiled when it is first called; its names stay.

    Raises:
        ValueError: it is a compiled one already.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "`compile=True` compiles the model, but it is one that `torch.compile` has made: pass "
            "the plain model."
        )

    def call(*arguments: Any, **named: Any) -> Any:
        return model._call_impl(*arguments, **named)  # type: ignore[no-untyped-call]

    # As `model.compile` does, which compiles nothing where the model is of a class of torch's own.
    model._compiled_call_impl = torch.compile(call, dynamic=False)


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
