"""What stands under ``torch.sim``: the functions that ``torch.cuda`` has, as far as torch asks."""

from __future__ import annotations

from typing import Any

import torch

DEVICES = 4
_Device = torch.device | str | int | None

default_generators: tuple[torch.Generator, ...] = ()
"""One per device; set where the library is loaded."""


def index_of(device: _Device = None) -> int:
    """Give the number of a device; none or "sim" is the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return True


is_initialized = is_built = is_available
_initialized = True  # activation checkpointing looks here before it keeps generators' states


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(index_of(device))


def get_device_name(device: _Device = None) -> str:
    return "test accelerator"


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    return (0, 0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


class device:
    """Computes on a device inside the block."""

    def __init__(self, device: _Device) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *error: Any) -> None:
        set_device(self._before)


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(index_of(device))


def Stream(device: _Device = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(f"sim:{index_of(device)}", priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
    return torch.Event("sim", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """Issue work on a stream inside the block."""
    return stream


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(index_of(device))


def max_memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.max_memory_allocated(index_of(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def memory_stats_as_nested_dict(device: _Device = None) -> dict[str, Any]:
    sizes = {"current": memory_allocated(device), "peak": max_memory_allocated(device)}
    return {"allocated_bytes": {"all": sizes}}


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Give the free and the total bytes."""
    return torch.accelerator.get_memory_info(index_of(device))


def get_rng_state(device: _Device = None) -> torch.Tensor:
    return default_generators[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    default_generators[index_of(device)].set_state(state)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


class _Runtime:
    """What ``torch.cuda.cudart()`` gives, as far as anybody asks here."""

    @staticmethod
    def cudaHostRegister(place: int, num_bytes: int, flags: int) -> int:
        _sim().sim_register(place, num_bytes)
        return 0

    @staticmethod
    def cudaHostUnregister(place: int) -> int:
        _sim().sim_unregister(place)
        return 0


def cudart() -> _Runtime:
    return _Runtime()


def _sim() -> Any:
    from tests.accelerator.sim import _loaded

    return _loaded().sim
