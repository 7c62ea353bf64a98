"""Watches a program that trains with Unisono: the samples and gradients of every shard.

There every number must be the same, bit for bit, whoever computes it, so digests are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.data.loader import Loader
from unisono.step.closure_engine import ClosureEngine
from unisono.step.engine import StepEngine
from unisono.step.gradients import GradientStack
from unisono.train.run_context import RunContext
from unisono.verify.recorder import Recorder
from unisono.verify.replay_facts import replay_facts
from unisono.verify.sample_contents import hash_of_sample
from unisono.verify.sketches import digest_of_tensor
from unisono.verify.wrapping import wrap


class ExactHooks:
    """Hooks around Unisono's own loop. Final.

    Args:
        recorder: takes what is seen.
        engage: called once a program turns out to train with Unisono.
    """

    def __init__(self, recorder: Recorder, engage: Callable[[], None]) -> None:
        self._recorder, self._engage = recorder, engage
        self._names: list[str] = []
        self._model: Any = None
        self._optimizer: Any = None
        self._step = 0

    def install(self) -> None:
        """Put the hooks in place."""
        wrap(RunContext, "__init__", self._begin_run)
        wrap(Loader, "batch", self._read_batch)
        wrap(StepEngine, "__init__", self._make_engine)
        wrap(StepEngine, "begin", self._begin_step)
        wrap(StepEngine, "finish", self._finish_step)
        wrap(ClosureEngine, "finish", self._finish_step)
        wrap(GradientStack, "push", self._push)

    def _begin_run(self, before: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not self._recorder.is_exact:
            self._recorder.is_exact = True
            self._engage()
            self._recorder.write("exact")
        before(*args, **kwargs)

    def _read_batch(
        self, before: Callable[..., Any], loader: Any, place: Any, *args: Any, **kwargs: Any
    ) -> Any:
        given = before(loader, place, *args, **kwargs)
        try:
            content = hash_of_sample(given)
        except TypeError as error:
            content = str(error)
        self._recorder.write("shard-samples", step=self._step, shard=place.shard, hash=content)
        return given

    def _make_engine(
        self, before: Callable[..., None], engine: Any, *given: Any, **kwargs: Any
    ) -> None:
        self._model, self._optimizer, *_ = given
        before(engine, *given, **kwargs)

    def _begin_step(
        self, before: Callable[..., None], engine: Any, step: int, first_shard: int
    ) -> None:
        self._step, self._names = step, engine._bound._names
        before(engine, step, first_shard)

    def _finish_step(self, before: Callable[..., Any], engine: Any) -> Any:
        means, is_done = before(engine)
        if is_done:
            self._record(means)
        return means, is_done

    def _record(self, means: dict[str, float]) -> None:
        model = self._model
        self._recorder.write(
            "exact-step",
            step=self._step,
            means={name: value.hex() for name, value in means.items()},
            parameters={name: digest_of_tensor(p) for name, p in model.named_parameters()},
            buffers={name: digest_of_tensor(b) for name, b in model.named_buffers()},
        )
        if self._recorder.options.replays:
            named = list(model.named_parameters())
            state = {name: self._optimizer.state.get(p, {}) for name, p in named}
            self._recorder.write("replay", **replay_facts(self._step, named, state))
        self._recorder.num_steps += 1
        self._recorder.flush()
        if self._recorder.num_steps >= self._recorder.options.steps:
            self._recorder.stop()

    def _push(self, before: Callable[..., Any], stack: Any, shard: int) -> Any:
        self._recorder.damage(stack._parameters)
        pairs = zip(self._names, stack._parameters, strict=True)
        gradients = {
            name: digest_of_tensor(parameter.grad)
            for name, parameter in pairs
            if parameter.grad is not None
        }
        self._recorder.write("shard", step=self._step, shard=shard, gradients=gradients)
        return before(stack, shard)
