"""Turns torch's error of a full memory into ours, with what this worker can measure of it.

``shortage.py`` says it in words. Nothing that fails here replaces torch's error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unisono.device import AUTO, Device, count_of
from unisono.errors import OutOfMemoryError
from unisono.train.run_context import RunContext
from unisono.train.shortage import Shortage, in_words
from unisono.world import workers_per_gpu

_OF_THE_HOST = "DefaultCPUAllocator"  # how torch begins to tell that malloc gave nothing


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether torch raised something because memory is full, of a device or of the host."""
    return isinstance(error, torch.OutOfMemoryError) or (
        type(error) is RuntimeError and _OF_THE_HOST in str(error)
    )


def explained(
    error: Exception,
    run: RunContext,
    phase: str,
    *,
    step: int | None = None,
    shard: int | None = None,
    batch_size: int | None = None,
) -> Exception:
    """Explain an error if it is one of a full memory.

    Args:
        error: what was raised.
        run: the run under way.
        phase: what this worker was in; see :mod:`unisono.train.shortage`.
        step, shard: where.
        batch_size: of the batches; None: of the run's.

    Returns:
        Our error, whose cause it is; or itself.
    """
    if not is_out_of_memory(error):
        return error
    try:
        full = full_one(run.device, error)
        shortage = _measured(run, full, phase, step, shard, batch_size)
    except Exception:
        return error
    ours = OutOfMemoryError(
        in_words(shortage),
        rank=shortage.rank,
        device=shortage.device,
        step=step,
        shard=shard,
        phase=phase,
        needed=shortage.all_needed,
    )
    ours.__cause__ = error
    return ours


@contextmanager
def memory_explained(run: RunContext, phase: str) -> Iterator[None]:
    """Explain what is raised inside the block because memory is full."""
    try:
        yield
    except Exception as error:
        ours = explained(error, run, phase)
        if ours is error:
            raise
        raise ours from error


def _measured(
    run: RunContext,
    device: Device,
    phase: str,
    step: int | None,
    shard: int | None,
    batch_size: int | None,
) -> Shortage:
    plan = run.plan
    allocated = device.memory()
    free, total = device.room()
    if batch_size is None and plan is not None:
        batch_size = plan.batch_size
    return Shortage(
        device=device.name,
        rank=run.team.world.rank,
        phase=phase,
        step=step,
        shard=shard,
        needed=_needed(run, device),
        peak=None if allocated is None else allocated[2],
        total=total,
        free=free,
        reserved=0 if allocated is None else allocated[1],
        shards=None if plan is None else plan.shards,
        batch_size=batch_size,
        precision=run.fixed.get("precision"),
        workers_per_device=_num_sharing(run),
        is_host=device.is_host,
        num_devices=count_of(device.torch.type),
        is_split=run.device.is_divided,
    )


def _num_sharing(run: RunContext) -> int:
    """Count the workers that compute on this worker's device."""
    here, name = run.team.world.local_world_size, run.options.device
    if run.device.is_host:
        return 1
    if name != AUTO and torch.device(name).index is not None:
        return here
    return min(workers_per_gpu(), here)


def full_one(device: Device, error: Exception) -> Device:
    """Say which of the devices of a split model is full, as torch's error says or by its room."""
    for part in device.parts:
        names = rf"{re.escape(part.name)}\b|\bGPU {part.torch.index}\b"
        if re.search(names, str(error)):
            return part
    return min(device.parts, key=lambda part: part.room()[0] or 0)


def _needed(run: RunContext, device: Device) -> dict[str, int]:
    model, optimizer = run.kept.model, run.kept.optimizer
    held = [*model.parameters(), *model.buffers()]
    state = [
        value
        for of_one in optimizer.state.values()
        if isinstance(of_one, dict)
        for value in of_one.values()
    ]
    needed = {
        "parameters": _bytes(held, device),
        "gradients": 0,
        "optimizer state": _bytes(state, device),
    }
    if run.engine is not None:
        needed["gradients"] = run.engine.passes.gradient_bytes(device)
        exchange = run.engine.exchange.device_bytes
        if exchange and device in run.device.parts:
            parameters = run.engine.exchange.parameters
            whole = sum(parameter.nbytes for parameter in parameters)
            needed["the exchange's buffers"] = exchange * _bytes(parameters, device) // (whole or 1)
    return {name: size for name, size in needed.items() if size}


def _bytes(values: Iterable[Any], device: Device) -> int:
    tensors = [v for v in values if isinstance(v, torch.Tensor) and device.has(v)]
    return sum(tensor.nbytes for tensor in tensors)
