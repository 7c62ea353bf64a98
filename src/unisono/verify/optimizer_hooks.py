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

from unisono.verify.module_hooks import ModuleHooks
from unisono.verify.recorder import Recorder
from unisono.verify.replay_facts import replay_facts
from unisono.verify.sketches import digest_of_tensor, sketch_of
from unisono.verify.wrapping import wrap

_PASSES_AT_MOST = 64


class OptimizerHooks:
    """Hooks around every optimizer of a process. Final."""

    def __init__(self, recorder: Recorder, modules: ModuleHooks) -> None:
        self._recorder, self._modules = recorder, modules
        self._ordinals: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._passes: dict[int, list[list[float]]] = {}
        self._pass_of: dict[int, int] = {}
        self._backward_after = -1
        self._num_passes = 0
        self._ticks = 0
        self._watched: dict[int, Any] = {}
        self._kept: list[Any] = []  # what is known by its id, which no other may get
        self._clipped: dict[int, tuple[list[float], str]] = {}
        self._handles: list[Any] = []

    def install(self) -> None:
        """Put the hooks in place."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        wrap(Optimizer, "add_param_group", self._add_group)
        wrap(Optimizer, "zero_grad", self._zero)
        wrap(torch.nn.Module, "zero_grad", self._zero)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(torch.nn.utils.clip_grad, name, self._clip, torch.nn.utils)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
            wrap(kind, "step", self._tick)

    def remove(self) -> None:
        """Take all hooks away that a parameter or an optimizer has."""
        for handle in [*self._handles, *self._watched.values()]:
            handle.remove()
        self._handles, self._watched = [], {}

    @property
    def _is_full(self) -> bool:
        at_most = self._recorder.options.full_steps
        return max(self._counts.values(), default=0) < at_most

    def _add_group(
        self, before: Callable[..., None], optimizer: Optimizer, group: dict[str, Any]
    ) -> None:
        before(optimizer, group)
        if not self._recorder.is_exact:
            self._watch(optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        for parameter in _parameters(optimizer):
            if id(parameter) not in self._watched and parameter.requires_grad:
                hook = functools.partial(self._see, parameter)
                with self._recorder.guarded():
                    self._watched[id(parameter)] = parameter.register_hook(hook)
                    self._kept.append(parameter)

    def _see(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """See the gradient of one backward pass."""
        if self._backward_after != self._modules.forwards:
            self._recorder.write("backward", since=self._backward_after, to=self._modules.forwards)
            self._backward_after = self._modules.forwards
            self._num_passes += 1
        if not self._is_full:
            return
        with self._recorder.guarded():
            self._add_to_pass(id(parameter), parameter, gradient)

    def _add_to_pass(self, key: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        passes = self._passes.setdefault(key, [])
        if parameter.grad is None and self._pass_of.get(key) != self._num_passes:
            passes.clear()
        sketch = sketch_of(gradient)
        if passes and (self._pass_of.get(key) == self._num_passes or len(passes) > _PASSES_AT_MOST):
            passes[-1] = [a + b for a, b in zip(passes[-1], sketch, strict=True)]
        else:
            passes.append(sketch)
        self._pass_of[key] = self._num_passes

    def _zero(
        self,
        before: Callable[..., None],
        owner: Optimizer | torch.nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Forget the passes of gradients that are set to zero instead of to None."""
        for parameter in _parameters(owner):
            self._passes.pop(id(parameter), None)
        before(owner, *args, **kwargs)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._recorder.guarded():
            self._recorder.damage(_parameters(optimizer))
            self._record_step(optimizer)

    def _record_step(self, optimizer: Optimizer) -> None:
        ordinal = self._ordinal(optimizer)
        number = self._counts.get(ordinal, 0)
        is_full = number < self._recorder.options.full_steps
        gradients = {}
        for name, parameter in self._named(optimizer):
            if parameter.grad is not None and is_full:
                gradients[name] = self._gradient_of(parameter)
        self._recorder.write(
            "step",
            o=ordinal,
            n=number,
            kind=type(optimizer).__name__,
            lr=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            ticks=self._ticks,
            gradients=gradients,
            full=is_full,
        )
        self._ticks = 0
        self._clipped = {}

    def _ordinal(self, optimizer: Optimizer) -> int:
        if id(optimizer) not in self._ordinals:
            self._kept.append(optimizer)
            self._ordinals[id(optimizer)] = len(self._ordinals)
        return self._ordinals[id(optimizer)]

    def _gradient_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        gradient = parameter.grad
        assert gradient is not None
        facts: dict[str, Any] = {
            "g": sketch_of(gradient),
            "d": digest_of_tensor(gradient),
            "p": self._passes.get(id(parameter), []),
            "size": gradient.numel(),
        }
        if id(parameter) in self._clipped:
            facts["c"], facts["cd"] = self._clipped[id(parameter)]
        return facts

    def _named(self, optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
        named = []
        for at, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = self._modules.names.get(id(parameter), f"group {at}, parameter {index}")
                named.append((name, parameter))
        return named

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ordinal = self._ordinal(optimizer)
        number = self._counts[ordinal] = self._counts.get(ordinal, 0) + 1
        self._recorder.num_steps += 1
        with self._recorder.guarded():
            named = self._named(optimizer) if number <= self._recorder.options.full_steps else []
            self._recorder.write(
                "stepped",
                o=ordinal,
                n=number - 1,
                parameters={
                    name: [sketch_of(parameter), digest_of_tensor(parameter)]
                    for name, parameter in named
                },
            )
            if self._recorder.options.replays:
                state = {name: optimizer.state.get(p, {}) for name, p in self._named(optimizer)}
                self._recorder.write("replay", **replay_facts(None, self._named(optimizer), state))
            self._recorder.flush()
        if max(self._counts.values()) >= self._recorder.options.steps:
            self._recorder.stop()

    def _clip(self, before: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        one = isinstance(parameters, torch.Tensor)
        parameters = parameters if one else list(parameters)
        if self._is_full and not self._recorder.is_exact:
            with self._recorder.guarded():
                self._keep_unclipped([parameters] if one else parameters)
        return before(parameters, *args, **kwargs)

    def _keep_unclipped(self, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in self._clipped:
                gradient = parameter.grad
                self._clipped[id(parameter)] = sketch_of(gradient), digest_of_tensor(gradient)

    def _tick(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._ticks += 1
        return before(*args, **kwargs)


def _parameters(owner: Optimizer | torch.nn.Module) -> Iterator[Any]:
    if isinstance(owner, torch.nn.Module):
        yield from owner.parameters()
    else:
        for group in owner.param_groups:
            yield from group["params"]
