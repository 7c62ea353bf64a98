"""In a loop of the program's own: is a model's output a function of its inputs?

The body of such a loop is not run again, as what it counts is its own. Instead the first call of
each model in a step is made a second time, from the same inputs, random numbers and buffers, with
nothing kept for a backward pass (``computed_twice.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unisono.runtime.repeated import Seen
from unisono.training.computed_twice import ComputedTwice, copied, leaves_of
from unisono.training.run_context import RunContext


@contextmanager
def models_called_twice(run: RunContext) -> Iterator[None]:
    """Have the first call of each model of a run made twice within a block."""
    twice, model = ComputedTwice(run), run.kept.model
    models = [*model.children()] if type(model) is nn.ModuleDict else [model]
    with ExitStack() as stack:
        for each in models:
            is_compiled = isinstance(each, torch.jit.ScriptModule) or hasattr(each, "_orig_mod")
            if twice.is_exact and not is_compiled and not run.device.is_divided:
                stack.callback(_FirstCall(run, twice, each).close)
        yield


class _FirstCall:
    """The first call of one model in a step. Final."""

    def __init__(self, run: RunContext, twice: ComputedTwice, model: nn.Module) -> None:
        self._run, self._twice, self._model = run, twice, model
        self._before = ExitStack()  # puts generators back to where the call has found them
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, with_kwargs=True),
        ]

    def close(self) -> None:
        """Look at no call any more."""
        for hook in self._hooks:
            hook.remove()
        self._before.close()

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._given, self._state = tree_map(copied, (args, kwargs)), _state_of(model)
        engine = self._run.engine
        assert engine is not None
        self._before.enter_context(engine.passes.generators_put_back())

    def _end(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        engine = self._run.engine
        assert engine is not None
        passes, first, after = engine.passes, self._twice.look(), _state_of(model)

        def again(elsewhere: AbstractContextManager[None] | None = None) -> Seen:
            args, kwargs = tree_map(copied, self._given)
            _put_back(model, self._state)
            nothing = torch.empty(0, device=engine.exchange.device.torch)
            unsaved = torch.autograd.graph.saved_tensors_hooks(lambda _: nothing, lambda _: nothing)
            here = elsewhere or nullcontext()
            with suppress(Exception), passes.generators_put_back(), unsaved, here:
                return leaves_of(model.forward(*args, **kwargs))
            return {}

        try:
            with passes.generators_put_back():
                self.close()
                self._twice.compare(leaves_of(output), first, again)
        finally:
            _put_back(model, after)


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {
        name: value.detach().clone() for name, value in [*frozen.items(), *model.named_buffers()]
    }


def _put_back(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in state.items():
        there[name].data.copy_(value)
