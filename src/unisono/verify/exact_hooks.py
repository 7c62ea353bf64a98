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
from unisono.verify.digests import bits_to_resume, digests_of, hash_of_sample
from unisono.verify.recorder import Recorder, wrap


class ExactHooks:
    """Hooks around Unisono's own loop. Final."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
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
        self._recorder.train_with_unisono()
        before(*args, **kwargs)

    def _read_batch(
        self, before: Callable[..., Any], loader: Any, place: Any, *args: Any, **kwargs: Any
    ) -> Any:
        given = before(loader, place, *args, **kwargs)
        try:
            content = hash_of_sample(given)
        except TypeError as error:
            content = str(error)
        self._write("samples", place.shard, {"the batch": content})
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

    def _push(self, before: Callable[..., Any], stack: Any, shard: int) -> Any:
        self._recorder.damage(stack._parameters)
        pairs = zip(self._names, stack._parameters, strict=True)
        gradients = [(name, p.grad) for name, p in pairs if p.grad is not None]
        self._write("gradients", shard, digests_of(gradients))
        return before(stack, shard)

    def _finish_step(self, before: Callable[..., Any], engine: Any) -> Any:
        means, is_done = before(engine)
        if is_done:
            self._record_step()
        return means, is_done

    def _record_step(self) -> None:
        named, recorder = list(self._model.named_parameters()), self._recorder
        bits = {"buffers": digests_of(self._model.named_buffers())}
        if recorder.options.replays:
            bits |= bits_to_resume({n: self._optimizer.state.get(p, {}) for n, p in named})
        bits["parameters"] = digests_of(named)
        recorder.write("step-bits", step=self._step, bits=bits)
        recorder.num_steps += 1
        recorder.flush()
        if recorder.num_steps >= recorder.options.steps:
            recorder.stop()

    def _write(self, kind: str, shard: int, digests: dict[str, str]) -> None:
        self._recorder.write("shard-bits", step=self._step, shard=shard, bits={kind: digests})
