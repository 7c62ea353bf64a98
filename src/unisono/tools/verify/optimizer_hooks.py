"""Watches optimizers: gradients after each backward pass, and at each step.

A parameter's hook sees the gradient of one backward pass before it is added to ``.grad``, and thus
before it is averaged. A hook of all optimizers sees the final gradient at ``step()``.

Others watch torch.distributed, and the steps of Unisono: there every number must be the same, bit
for bit, on any worker, so digests of each shard are enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from typing_extensions import override

from unisono.engine.step.shard_passes import ShardPasses
from unisono.engine.step.step_watch import StepWatch
from unisono.tools.verify.digests import (
    bits_to_resume,
    digests_of,
    hash_of_sample,
    plain,
    sketch_of,
)
from unisono.tools.verify.module_hooks import ModuleHooks
from unisono.tools.verify.recorder import Recorder, observe, wrap
from unisono.tools.verify.trace import Backward, Collective, Gradient, Note, OptimizerStep
from unisono.training.run import Run

_PASSES_AT_MOST = 64


@final
class OptimizerHooks:
    """Hooks around every optimizer of a process."""

    def __init__(self, recorder: Recorder, modules: ModuleHooks) -> None:
        self._recorder, self._modules = recorder, modules
        self._counts: dict[Optimizer, int] = {}  # of steps, in the order of first steps
        self._begun: dict[Optimizer, OptimizerStep] = {}  # what is known before a step
        self._seen: dict[Optimizer, int] = {}  # number of backward passes before its newest step
        self._passes: dict[torch.Tensor, list[list[float]]] = {}  # by parameter, like the next
        self._pass_of: dict[torch.Tensor, int] = {}
        self._clipped: dict[torch.Tensor, list[float]] = {}
        self._backward_after = -1
        self._num_passes = self._ticks = 0
        self._no_sync = False
        self._watched: set[torch.Tensor] = set()
        self._bits_before: dict[str, str] = {}

    def install(self) -> None:
        """Install the hooks."""
        recorder = self._recorder
        recorder.handles.append(register_optimizer_step_pre_hook(self._before))
        recorder.handles.append(register_optimizer_step_post_hook(self._after))
        wrap(Optimizer, "add_param_group", self._add_group)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(torch.nn.utils.clip_grad, name, self._clip, torch.nn.utils)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
            observe(recorder, kind, "step", self._tick)
        observe(recorder, DistributedDataParallel, "no_sync", self._enter_no_sync)

    def _has_full(self, number: int | None = None) -> bool:
        """Return whether gradients of an optimizer's `number`-th step are kept; None: the newest"""
        newest = max(self._counts.values(), default=0)
        return (newest if number is None else number) < self._recorder.options.full_steps

    def _add_group(
        self, before: Callable[..., None], optimizer: Optimizer, group: dict[str, Any]
    ) -> None:
        before(optimizer, group)
        if self._recorder.is_exact:
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter not in self._watched and parameter.requires_grad:
                with self._recorder.guarded():
                    hook = functools.partial(self._see, parameter)
                    self._recorder.handles.append(parameter.register_hook(hook))
                    self._watched.add(parameter)

    def _see(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Record the gradient of one backward pass."""
        modules = self._modules
        if self._backward_after != modules.forwards:
            self._recorder.write(Backward(modules.first, modules.has_drawn, self._no_sync))
            modules.first, modules.has_drawn, self._no_sync = -1, False, False
            self._backward_after = modules.forwards
            self._num_passes += 1
        if self._has_full():
            with self._recorder.guarded():
                self._add_to_pass(parameter, gradient)

    def _add_to_pass(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        passes = self._passes.setdefault(parameter, [])
        is_same_pass = self._pass_of.get(parameter) == self._num_passes
        if not is_same_pass and (parameter.grad is None or not plain(parameter.grad).any()):
            passes.clear()
        sketch = sketch_of(gradient)
        if passes and (is_same_pass or len(passes) > _PASSES_AT_MOST):
            passes[-1] = [a + b for a, b in zip(passes[-1], sketch, strict=True)]
        else:
            passes.append(sketch)
        self._pass_of[parameter] = self._num_passes

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._recorder.guarded():
            named, number = self._named(optimizer), self._counts.setdefault(optimizer, 0)
            since = self._seen.get(optimizer, max(self._seen.values(), default=0))
            self._begun[optimizer] = OptimizerStep(
                number=number,
                optimizer=list(self._counts).index(optimizer),
                lr=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                ticks=self._ticks,
                state=self._modules.state,
                backwards=(since, self._num_passes),
                gradients={
                    name: Gradient(
                        sketch_of(p.grad),
                        self._passes.get(p, []),
                        self._clipped.get(p),
                        p.grad.numel(),
                    )
                    for name, p in (named if self._has_full(number) else [])
                    if p.grad is not None
                },
            )
            self._ticks, self._clipped = 0, {}
            self._seen[optimizer] = self._num_passes
            if self._recorder.options.replays:
                self._bits_before = digests_of(named)

    def _named(self, optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
        return [
            (self._modules.names.get(parameter, f"group {at}, parameter {index}"), parameter)
            for at, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        ]

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder, number = self._recorder, self._counts.get(optimizer, 0)
        self._counts[optimizer] = number + 1
        with recorder.guarded():
            named = self._named(optimizer)
            kept = {name: sketch_of(p) for name, p in named if self._has_full(number)}
            recorder.write(replace(self._begun.pop(optimizer), parameters=kept))
            if recorder.options.replays:
                bits = bits_to_resume({name: optimizer.state.get(p, {}) for name, p in named})
                bits |= {"before": self._bits_before, "parameters": digests_of(named)}
                recorder.write_bits(
                    bits | {"inputs": {"the batch": " ".join(self._modules.inputs)}}
                )
            self._modules.inputs.clear()
        recorder.count_step(max(self._counts.values()))

    def _clip(self, before: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if torch.is_tensor(parameters) else list(parameters)
        if self._has_full() and not self._recorder.is_exact:
            with self._recorder.guarded():
                for parameter in parameters:
                    if parameter.grad is not None and parameter not in self._clipped:
                        self._clipped[parameter] = sketch_of(parameter.grad)
        return before(parameters, *args, **kwargs)

    def _tick(self, *_: Any, **__: Any) -> None:
        self._ticks += 1

    def _enter_no_sync(self, *_: Any) -> None:
        self._no_sync = True


# Collectives that combine what ranks have; a broadcast or a barrier does not.
_JOINING = (
    "all_reduce reduce all_gather all_gather_into_tensor all_gather_single all_gather_object "
    "gather gather_object all_to_all all_to_all_single"
)
# The first argument of those whose numbers are recorded.
_KEPT = {
    "all_reduce": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor_list",
    "all_gather_object": "object_list",
}
_VALUES_AT_MOST = 64


@final
class CollectiveHooks:
    """Hooks around the functions of torch.distributed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._depth = 0

    def install(self) -> None:
        """Install the hooks."""
        for name in _JOINING.split():
            if hasattr(distributed_c10d, name):
                wrap(distributed_c10d, name, functools.partial(self._watch, name), dist)

    def _watch(self, name: str, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depth or self._recorder.is_exact:
            return before(*args, **kwargs)
        value = None  # others have no numbers, or not at once
        if name in _KEPT and not kwargs.get("async_op"):
            value = args[0] if args else kwargs.get(_KEPT[name])
        given: list[float] = []
        with self._recorder.guarded():
            given = _numbers(value)
        self._depth += 1
        try:
            result = before(*args, **kwargs)
        finally:
            self._depth -= 1
        with self._recorder.guarded():
            self._recorder.write(Collective(name, _numbers(value), given))
        return result


def _numbers(value: Any) -> list[float]:
    """Return the numbers in tensors and lists, in order, if they are few."""
    if isinstance(value, torch.Tensor):
        few = value.numel() <= _VALUES_AT_MOST
        return value.detach().double().reshape(-1).tolist() if few else []
    if isinstance(value, (list, tuple, dict)) and len(value) <= _VALUES_AT_MOST:
        inner = value.values() if isinstance(value, dict) else value
        return [number for one in inner for number in _numbers(one)]
    return [float(value)] if isinstance(value, (int, float)) else []


@final
class ExactHooks(StepWatch):
    """Watches Unisono's steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names: Sequence[str] = ()
        self._before: dict[str, str] = {}

    def install(self) -> None:
        """Install the hooks."""
        wrap(Run, "__init__", self._begin_run)
        ShardPasses.watch = self

    def _begin_run(self, before: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._recorder.train_with_unisono()
        before(*args, **kwargs)

    @override
    def begin(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        self._names = names
        if self._recorder.options.replays:
            self._before = digests_of(model.named_parameters())

    @override
    def read(self, shard: int, batch: Any) -> None:
        try:
            content = hash_of_sample(batch)
        except TypeError as error:
            content = str(error)
        self._recorder.write_bits({"samples": {"the batch": content}}, shard)

    @override
    def differentiated(self, shard: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        pairs = zip(self._names, parameters, strict=True)
        gradients = digests_of((name, p.grad) for name, p in pairs if p.grad is not None)
        self._recorder.write_bits({"gradients": gradients}, shard)

    @override
    def done(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        named, recorder = list(model.named_parameters()), self._recorder
        bits = {"buffers": digests_of(model.named_buffers()), "parameters": digests_of(named)}
        if recorder.options.replays:
            bits |= bits_to_resume({name: optimizer.state.get(p, {}) for name, p in named})
            bits["before"] = self._before
        recorder.write_bits(bits)
        recorder.count_step()

    @override
    def told(self, line: str) -> None:
        if line.startswith("the loss "):  # it depends on the number of shards
            self._recorder.write(Note("loss", line))
