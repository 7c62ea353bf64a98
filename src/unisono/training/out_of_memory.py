"""Explains torch's out-of-memory errors: where they came from, what uses the memory, what helps."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import final

import torch

from unisono.engine.state.optimizer_state import states_here
from unisono.errors import OutOfMemoryError
from unisono.runtime.device import Device, count_of
from unisono.runtime.notices import size
from unisono.runtime.workers.team import Team
from unisono.runtime.world import workers_per_gpu
from unisono.training.run_context import RunContext

_OF_THE_HOST = "DefaultCPUAllocator"  # how torch's message for a failed malloc begins


def explained(
    error: Exception, run: RunContext, phase: str, step: int | None = None, shard: int | None = None
) -> Exception:
    """Return our error for an out-of-memory error, which is its cause; others unchanged."""
    of_the_host = type(error) is RuntimeError and _OF_THE_HOST in str(error)
    of_the_host |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (of_the_host or isinstance(error, torch.OutOfMemoryError)):
        return error
    device, rank = _full_one(run.device, error), run.team.world.rank
    needed, where = _needed(run, device), "" if shard is None else f" of shard {shard}"
    where += "" if step is None else f" in step {step}"
    sizes = ", ".join(f"{name} {size(taken)}" for name, taken in needed.items())
    ours = OutOfMemoryError(
        f"the memory of {'this machine' if device.is_host else device.name} must hold what the "
        f"{phase}{where} needs, but rank {rank} found it full: {sizes}. To make room: "
        f"{'; or '.join(_remedies(run, phase, device))}.",
        rank=rank,
        device=device.name,
        step=step,
        shard=shard,
        phase=phase,
        needed=needed,
    )
    ours.__cause__ = error
    return ours


@contextmanager
def memory_explained(run: RunContext, phase: str) -> Iterator[None]:
    """Explain out-of-memory errors within a block."""
    try:
        yield
    except Exception as error:
        if (ours := explained(error, run, phase)) is error:
            raise
        raise ours from error


def _full_one(device: Device, error: Exception) -> Device:
    """Return the full device of a split model, as torch's error names it."""
    names = {part: rf"{re.escape(part.name)}\b|\bGPU {part.torch.index}\b" for part in device.parts}
    return next((part for part in names if re.search(names[part], str(error))), device.parts[0])


def _needed(run: RunContext, device: Device) -> dict[str, int]:
    """Return bytes by purpose; what the peak has beyond the rest is activations."""
    model, states = run.kept.model, states_here(run.kept.optimizer)
    state = [value for each in states if isinstance(each, dict) for value in each.values()]
    parameters = () if run.engine is None else run.engine.exchange.parameters
    needed = {
        "parameters": _bytes([*model.parameters(), *model.buffers()], device),
        "gradients": _bytes(parameters, device),
        "optimizer state": _bytes(state, device),
    }
    if (taken := device.memory()) is not None:
        needed["activations"] = max(taken[1] - sum(needed.values()), 0)
    return {name: num_bytes for name, num_bytes in needed.items() if num_bytes}


def _bytes(values: Iterable[object], device: Device) -> int:
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and device.has(v))


def _remedies(run: RunContext, phase: str, device: Device) -> Iterator[str]:
    plan, is_sweep = run.plan, phase.startswith("pass of")
    is_pass = is_sweep or phase.endswith(("pass", "batch"))
    if not device.is_host and min(workers_per_gpu(), run.team.world.local_world_size) > 1:
        yield "share the device with fewer workers"
    if is_sweep:
        yield "pass a smaller `batch_size` there"
    elif is_pass and plan is not None and plan.shards < plan.batch_size:
        more = min(2 * plan.shards, plan.batch_size)
        yield f"pass `shards={more}` (now {plan.shards}): passes have fewer samples, bits differ"
    if is_pass:
        yield 'compute in bfloat16 (`precision="bf16"`)'
        yield "have the model recompute activations (`torch.utils.checkpoint`)"
    else:
        yield "take an optimizer with less state, or pass it `foreach=False`"
    if device is not run.device:
        yield f"give {device.name} fewer layers (`balance=` of `unisono.split`)"
    elif count_of(device.torch.type) > 1:
        yield "put parts of the model on several devices (`unisono.split`)"


EVERY_S = 0.1


@final
class MemoryWatch:
    """Publishes this worker's use of its device's memory, at most ten times a second."""

    def __init__(self, device: Device, team: Team) -> None:
        self._device, self._team = device, team
        self._due_s = 0.0

    def begin(self) -> None:
        """Measure before the first step, and again after it."""
        self._due_s = 0.0
        self.measure()
        self._due_s = 0.0

    def measure(self) -> None:
        """Measure, if the last measurement is old enough."""
        now_s = perf_counter()
        if now_s >= self._due_s and (sizes := self._device.memory()) is not None:
            self._due_s = now_s + EVERY_S
            self._team.note_memory(sizes[0])
