"""What state of torch does a worker start with? The caller's, so that it computes the same.

Generators continue from the caller's states, that of each GPU from the caller's current one. If
there is none (a script, or a library that the caller had not loaded), all workers of the job start
from one fresh seed.

Modes are taken along if they change what is computed and belong to no device: the default dtype,
whether gradients are recorded, deterministic algorithms, and the switches of backends. The default
device is each worker's own.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from unisono.world import WORKERS_PER_GPU_VARIABLE

# What reads a mode, and what sets it in the torch that is given first.
_FUNCTIONS: dict[str, Callable[[Any, Any], object]] = {
    "get_default_dtype": lambda torch, dtype: torch.set_default_dtype(dtype),
    "is_grad_enabled": lambda torch, is_enabled: torch.set_grad_enabled(is_enabled),
    # 1: others warn, 2: others are refused. This setter tells the compiler, too.
    "get_deterministic_debug_mode": lambda torch, mode: torch.use_deterministic_algorithms(
        mode > 0, warn_only=mode == 1
    ),
    "get_float32_matmul_precision": lambda torch, name: torch.set_float32_matmul_precision(name),
}
# A switch that others follow comes before them.
_SWITCHES = (
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.mkldnn.enabled",
    "backends.cuda.matmul.allow_tf32",
    "backends.cudnn.allow_tf32",
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)


def generator_states() -> dict[str, Any]:
    """Take the states of the generators that are loaded here; loads none."""
    states: dict[str, Any] = {}
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    if "numpy.random" in sys.modules:
        states["numpy"] = sys.modules["numpy.random"].get_state()
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "get_rng_state"):
        torch = sys.modules["torch"]
        states["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_initialized() and torch.cuda.device_count():
            states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()  # the current GPU's
    return states


def start_generators(states: dict[str, Any], seed: int) -> None:
    """Set every generator to its state in `states`, or from `seed` where there is none."""
    import random

    import numpy as np
    import torch

    from unisono.device import seed_generators

    seed_generators(seed)
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(_as_tensor(states["torch"]))
        seed = torch.initial_seed()
    if WORKERS_PER_GPU_VARIABLE in os.environ:
        _start_on_gpus(states, seed)


def _start_on_gpus(states: dict[str, Any], seed: int) -> None:
    """Do so on every GPU, once it is used, but begin to use none. A worker has one of them."""
    import torch

    if "cuda" not in states:
        torch.cuda.manual_seed_all(seed)  # as `torch.manual_seed` would have done in the caller
        return
    for place in range(torch.cuda.device_count()):
        torch.cuda.set_rng_state(_as_tensor(states["cuda"]), place)


def _as_tensor(state: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def caller_modes() -> dict[str, Any]:
    """Read the modes of this process; nothing where torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    modes = {name: _read(torch, name) for name in (*_FUNCTIONS, *_SWITCHES)}
    return {name: mode for name, mode in modes.items() if mode is not None}


def set_modes(modes: dict[str, Any]) -> None:
    """Have torch compute in `modes`; those that are so already are left alone."""
    import torch

    for name, mode in modes.items():
        if _read(torch, name) == mode:
            continue
        if name in _FUNCTIONS:
            _FUNCTIONS[name](torch, mode)
        else:
            owner, _, switch = name.rpartition(".")
            setattr(attrgetter(owner)(torch), switch, mode)


def _read(torch: Any, name: str) -> Any:
    """Read a mode; None where torch does not know it, or will not tell.

    It refuses to say by an old name what has been set by a new one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = attrgetter(name)(torch)
            return found() if name in _FUNCTIONS else found
        except (AttributeError, RuntimeError):
            return None
