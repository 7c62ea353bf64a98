"""Watches optimizers: what do gradients look like after each backward pass, and at each step?

A hook of a parameter sees the gradient of one backward pass before it is added to ``.grad``, so
before anybody averages it. A hook of all optimizers sees what is left at ``step()``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from unisono.verify.digests import bits_to_resume, digest_of_tensor, digests_of, sketch_of
from unisono.verify.module_hooks import ModuleHooks
from unisono.verify.recorder import Recorder, observe, wrap

_PASSES_AT_MOST = 64


class OptimizerHooks:
    """Hooks around every optimizer of a process. Final."""

    def __init__(self, recorder: Recorder, modules: ModuleHooks) -> None:
        self._recorder, self._modules = recorder, modules
        self._ordinals: dict[int, int] = {}
        self._counts: dict[int, int] = {}  # of steps, by ordinal
        self._passes: dict[int, list[list[float]]] = {}  # by parameter, like the next
        self._pass_of: dict[int, int] = {}
        self._clipped: dict[int, dict[str, Any]] = {}
        self._backward_after = -1
        self._num_passes = self._ticks = 0
        self._watched: set[int] = set()
        self._kept: list[Any] = []  # what is known by its id, which no other may get

    def install(self) -> None:
        """Put the hooks in place."""
        recorder = self._recorder
        recorder.handles.append(register_optimizer_step_pre_hook(self._before))
        recorder.handles.append(register_optimizer_step_post_hook(self._after))
        wrap(Optimizer, "add_param_group", self._add_group)
        for owner in (Optimizer, torch.nn.Module):
            observe(recorder, owner, "zero_grad", self._forget)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(torch.nn.utils.clip_grad, name, self._clip, torch.nn.utils)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
            observe(recorder, kind, "step", self._tick)

    def _has_full(self, number: int) -> bool:
        """Tell whether gradients of an optimizer's `number`-th step are kept."""
        return number < self._recorder.options.full_steps

    def _add_group(
        self, before: Callable[..., None], optimizer: Optimizer, group: dict[str, Any]
    ) -> None:
        before(optimizer, group)
        if self._recorder.is_exact:
            return
        for parameter in _parameters(optimizer):
            if id(parameter) not in self._watched and parameter.requires_grad:
                with self._recorder.guarded():
                    hook = functools.partial(self._see, parameter)
                    self._recorder.handles.append(parameter.register_hook(hook))
                    self._watched.add(id(parameter))
                    self._kept.append(parameter)

    def _see(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """See the gradient of one backward pass."""
        if self._backward_after != self._modules.forwards:
            self._recorder.write("backward", since=self._backward_after, to=self._modules.forwards)
            self._backward_after = self._modules.forwards
            self._num_passes += 1
        if self._has_full(max(self._counts.values(), default=0)):
            with self._recorder.guarded():
                self._add_to_pass(id(parameter), parameter, gradient)

    def _add_to_pass(self, key: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        passes = self._passes.setdefault(key, [])
        is_same_pass = self._pass_of.get(key) == self._num_passes
        if parameter.grad is None and not is_same_pass:
            passes.clear()
        sketch = sketch_of(gradient)
        if passes and (is_same_pass or len(passes) > _PASSES_AT_MOST):
            passes[-1] = [a + b for a, b in zip(passes[-1], sketch, strict=True)]
        else:
            passes.append(sketch)
        self._pass_of[key] = self._num_passes

    def _forget(self, owner: Optimizer | torch.nn.Module, *_: Any, **__: Any) -> None:
        """Forget the passes of gradients that are set to zero instead of to None."""
        for parameter in _parameters(owner):
            self._passes.pop(id(parameter), None)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._recorder.guarded():
            self._recorder.damage(_parameters(optimizer))
            self._record_step(optimizer)

    def _record_step(self, optimizer: Optimizer) -> None:
        number = self._counts.get(self._ordinal(optimizer), 0)
        named = self._named(optimizer) if self._has_full(number) else []
        self._recorder.write(
            "step",
            optimizer=self._ordinal(optimizer),
            number=number,
            lr=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            ticks=self._ticks,
            gradients={name: self._gradient(p, p.grad) for name, p in named if p.grad is not None},
        )
        self._ticks, self._clipped = 0, {}

    def _ordinal(self, optimizer: Optimizer) -> int:
        if id(optimizer) not in self._ordinals:
            self._kept.append(optimizer)
            self._ordinals[id(optimizer)] = len(self._ordinals)
        return self._ordinals[id(optimizer)]

    def _gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> dict[str, Any]:
        """Take down a :class:`unisono.verify.trace.Gradient`."""
        return {
            "final": sketch_of(gradient),
            "digest": digest_of_tensor(gradient),
            "passes": self._passes.get(id(parameter), []),
            "size": gradient.numel(),
            **self._clipped.get(id(parameter), {}),
        }

    def _named(self, optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
        return [
            (self._modules.names.get(id(parameter), f"group {at}, parameter {index}"), parameter)
            for at, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        ]

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ordinal, recorder = self._ordinal(optimizer), self._recorder
        number = self._counts.get(ordinal, 0)
        self._counts[ordinal] = number + 1
        recorder.num_steps += 1
        with recorder.guarded():
            named = self._named(optimizer)
            full = named if self._has_full(number) else []
            parameters = {name: [sketch_of(p), digest_of_tensor(p)] for name, p in full}
            recorder.write("stepped", optimizer=ordinal, number=number, parameters=parameters)
            if recorder.options.replays:
                bits = bits_to_resume({name: optimizer.state.get(p, {}) for name, p in named})
                bits["parameters"] = digests_of(named)
                recorder.write("step-bits", step=None, bits=bits)
            recorder.flush()
        if max(self._counts.values()) >= recorder.options.steps:
            recorder.stop()

    def _clip(self, before: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        one = isinstance(parameters, torch.Tensor)
        parameters = parameters if one else list(parameters)
        is_full = self._has_full(max(self._counts.values(), default=0))
        if is_full and not self._recorder.is_exact:
            with self._recorder.guarded():
                self._keep_unclipped([parameters] if one else parameters)
        return before(parameters, *args, **kwargs)

    def _keep_unclipped(self, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if (gradient := parameter.grad) is not None and id(parameter) not in self._clipped:
                self._clipped[id(parameter)] = {
                    "clipped": sketch_of(gradient),
                    "clipped_digest": digest_of_tensor(gradient),
                }

    def _tick(self, *_: Any, **__: Any) -> None:
        self._ticks += 1


def _parameters(owner: Optimizer | torch.nn.Module) -> Iterator[Any]:
    if isinstance(owner, torch.nn.Module):
        yield from owner.parameters()
    else:
        for group in owner.param_groups:
            yield from group["params"]
