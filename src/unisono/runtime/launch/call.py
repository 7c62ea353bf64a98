"""How are a call and its results sent? As pickled values, together with their source lines.

The source lines of notebook cells are included: they are in no file, and tracebacks show them.

Generators continue from the caller's states; on each GPU from the state of the caller's current
GPU. Where the caller has no state (a script, or a library that is not loaded) they start from one
fresh seed. Modes are copied if they affect results and do not belong to a device.
"""

from __future__ import annotations

import io
import linecache
import os
import reprlib
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from operator import attrgetter
from typing import Any

from unisono.runtime.world import WORKERS_PER_GPU_VARIABLE


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, tuple[Any, ...]]:
    """Pickle a call with the caller's state; return large buffers separately, without a copy."""
    from unisono.runtime.launch.pickling import Pickler

    if not callable(fn):
        raise TypeError(
            f"`fn` must be a function that every worker calls, but is {reprlib.repr(fn)}: "
            "pass the function itself, as in `launch(main, workers=2)`."
        )
    file, buffers = io.BytesIO(), list[Any]()
    pickler = Pickler(file, buffers)
    call = {
        "function": fn,
        "args": args,
        "states": generator_states(),
        "modes": caller_modes(),
        "sources": sources_without_files(),
        "main": origin_of_main(),
        "of_main": pickler.of_main,  # last, as pickling the others fills it
    }
    try:
        pickler.dump(call)
    except Exception as error:
        raise TypeError(
            f"`fn` and its arguments must be picklable, but {_culprit(fn, args)} not ({error}): "
            "open files, locks and the like inside the function instead of passing them in."
        ) from error
    return file.getvalue(), tuple(buffers)


def pack_result(result: Any) -> bytes:
    """Pickle what a worker's function returned."""
    from unisono.runtime.launch.pickling import dumps

    try:
        return dumps(result)
    except Exception as error:
        raise TypeError(
            f"what a worker returns must be picklable, but a `{type(result).__qualname__}` is not "
            f"({error}): return numbers, tensors, or what is made of them, or nothing."
        ) from error


def _culprit(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return a name for the first part of a call that cannot be pickled."""
    from unisono.runtime.launch.pickling import dumps

    names = [f"function `{name_of(fn)}`", *(f"argument {i}" for i in range(1, len(args) + 1))]
    for name, part in zip(names, (fn, *args), strict=True):
        try:
            dumps(part)
        except Exception:
            # Classes may raise anything while they are pickled.
            return f"{name} is"
    return "are"


def unpack_result(packed: bytes, rank: int) -> Any:
    """Unpickle what :func:`pack_result` packed on worker `rank`; None if there is nothing."""
    from unisono.runtime.launch.pickling import load

    if not packed:  # it ended with `sys.exit(0)`
        return None
    try:
        return load(packed)
    except Exception as error:
        raise TypeError(
            f"what worker {rank} returned cannot be built here ({error}): return numbers, tensors, "
            f"or what is made of them, or let its module be imported here as it is in workers."
        ) from error


def name_of(fn: Callable[..., Any]) -> str:
    """Return a function's name for messages; for a callable object, that of its class."""
    kind = type(fn)
    return str(getattr(fn, "__qualname__", f"{kind.__module__}.{kind.__qualname__}"))


def sources_without_files() -> dict[str, list[str]]:
    """Return the source lines that Python knows and that are in no file: notebook cells."""
    return {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }


def origin_of_main() -> dict[str, Any]:
    """Return where the caller's ``__main__`` comes from; empty in a notebook or ``python -``."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not file or not os.path.isfile(file):
        return {}
    return {
        "__file__": os.path.abspath(file),
        "__spec__": spec and ModuleSpec(spec.name, None, origin=file),
    }


def register_sources(sources: dict[str, list[str]]) -> None:
    """Register source lines for tracebacks and :mod:`inspect`, in a worker."""
    for name, lines in sources.items():
        # Without a modification time, linecache never compares it with a file.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


# Functions that read a mode; each value sets the mode in the torch module that it is passed.
_FUNCTIONS: dict[str, Callable[[Any, Any], object]] = {
    "get_default_dtype": lambda torch, dtype: torch.set_default_dtype(dtype),
    "is_grad_enabled": lambda torch, is_enabled: torch.set_grad_enabled(is_enabled),
    # 1: warn about other operations, 2: reject them. This setter updates the compiler as well.
    "get_deterministic_debug_mode": lambda torch, mode: torch.use_deterministic_algorithms(
        mode > 0, warn_only=mode == 1
    ),
    "backends.cuda.flash_sdp_enabled": lambda torch, is_enabled: (
        torch.backends.cuda.enable_flash_sdp(is_enabled)
    ),
    "backends.mha.get_fastpath_enabled": lambda torch, is_enabled: (
        torch.backends.mha.set_fastpath_enabled(is_enabled)
    ),
    "get_float32_matmul_precision": lambda torch, name: torch.set_float32_matmul_precision(name),
}
_FLUSH = "set_flush_denormal"  # torch has no function that reads it
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
    """Return the states of the generators whose libraries are loaded; loads none."""
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
    """Set each generator to its state in `states`, or seed it from `seed` if there is none."""
    import random

    import numpy as np
    import torch

    from unisono.runtime.device import seed_generators

    seed_generators(seed)
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(_as_tensor(states["torch"]))
        seed = torch.initial_seed()
    # For every GPU, applied on first use; no GPU is initialized here. A worker uses one of them.
    if WORKERS_PER_GPU_VARIABLE in os.environ:
        if "cuda" not in states:
            torch.cuda.manual_seed_all(seed)  # as `torch.manual_seed` would have in the caller
        else:
            torch.cuda.set_rng_state_all([_as_tensor(states["cuda"])] * torch.cuda.device_count())


def _as_tensor(state: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def caller_modes() -> dict[str, Any]:
    """Return the modes of this process; empty if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    from unisono.runtime.device import flushes_denormals

    modes = {name: _read(torch, name) for name in (*_FUNCTIONS, *_SWITCHES)}
    modes[_FLUSH] = flushes_denormals()
    return {name: mode for name, mode in modes.items() if mode is not None}


def set_modes(modes: dict[str, Any]) -> None:
    """Set torch's modes, except those that already have the right value."""
    import torch

    for name, mode in modes.items():
        if name == _FLUSH:
            torch.set_flush_denormal(mode)
            continue
        if _read(torch, name) == mode:
            continue
        if name in _FUNCTIONS:
            _FUNCTIONS[name](torch, mode)
        else:
            owner, _, switch = name.rpartition(".")
            setattr(attrgetter(owner)(torch), switch, mode)


def _read(torch: Any, name: str) -> Any:
    """Return a mode; None if torch does not know it, or does not report it by an old name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = attrgetter(name)(torch)
            return found() if name in _FUNCTIONS else found
        except (AttributeError, RuntimeError):
            return None
