"""The buffers of a model, by the modules that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Home = tuple[torch.nn.Module, str]


def homes_of_buffers(model: torch.nn.Module) -> dict[str, list[Home]]:
    """Find each distinct buffer by its first full name, with every place that holds it."""
    first_names: dict[int, str] = {}
    homes: dict[str, list[Home]] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full_name = f"{prefix}.{name}" if prefix else name
                first = first_names.setdefault(id(buffer), full_name)
                homes.setdefault(first, []).append((module, name))
    return homes


def lazy_homes(model: torch.nn.Module) -> list[Home]:
    """Find the buffers that are registered but None."""
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is None
    ]


def buffer_at(home: Home) -> torch.Tensor:
    """Give the buffer at a place that holds one."""
    module, name = home
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


@contextmanager
def buffers_put_back(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Leave a model's buffers as they are; gives a function that puts them back in between."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    lazy = lazy_homes(model)

    def put_back() -> None:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                module._buffers[name] = buffer
                buffer.copy_(value)
        for module, name in lazy:
            module._buffers[name] = None

    try:
        yield put_back
    finally:
        put_back()
