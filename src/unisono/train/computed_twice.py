"""Is what a pass computes a function of its samples? Computed twice, now and then, and compared.

Other workers compute other shards, in another order, so a loss function or a model that remembers
its calls gives other results on each number of workers. A worker's first shard is computed twice in
a row, from the same samples, random numbers, parameters and buffers::

    rehearsal   a copy of the batch; RANK and WORLD_SIZE are another worker's
    look        what the program keeps beside its model    (kept_outside.py)
    pass        the one that counts
    look        what differs now goes on from pass to pass; what was only stored is the same

So a counter, a list or a queue is named before it changes anything; whatever else differs shows in
the loss, in metrics or in gradients. It is done in the first two steps of a loop, as what is kept
of another shard may tell only in the second, and in one of 1,024 later: 0.2 % of the time at most.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from unisono.state.contents import updated_parameters
from unisono.step.loss import read_loss
from unisono.train.kept_outside import Look, Plain, bits_of, states_of
from unisono.train.run_context import RunContext
from unisono.train.step import Step
from unisono.workers.context import context
from unisono.world import World

AT_FIRST, EVERY = 2, 1024  # steps
_GRADIENT = "the gradient of `{}`"
_MUST = "the loss function and the model must depend on the shard alone, but"
_IN_TIME = (
    "take the step from `unisono.progress()`, set a value in `on_step_begin`, return metrics in a "
    "dict, or keep a buffer of the model (`register_buffer`)."
)
_OF_TENSORS = (
    "keep a buffer of the model (`register_buffer`), return metrics in a dict, or return values of "
    'each sample as `"per_sample"` and change it in `on_step_end`, with those of the whole batch.'
)
_OF_RANKS = (
    "compute the same on every worker; for what one worker alone is to do, write a callback that "
    "asks for `fit.is_leader`."
)

Compute = Callable[[nn.Module, Any], Any]
Seen = dict[str, Any]
"""By name, what a pass has come to."""


class ComputedTwice:
    """Looks at the passes of one call of ``fit``. Final.

    Args:
        run: which is trained.
        functions: the loss function, and what gives features where there is such a one.
    """

    def __init__(self, run: RunContext, *functions: Compute | None) -> None:
        self._run, self._model = run, run.kept.model
        self._functions = [function for function in functions if function is not None]

    def compute(self, step: Step, batch: Any, loss: Compute) -> None:
        """Compute the shard at hand, after a rehearsal of it.

        Raises:
            RuntimeError: it is no function of its samples; names what is not.
        """
        if not self.is_exact:
            step.backward(loss(self._model, batch))
            return
        shard, num_samples, share = step.waiting
        engine = self._run.engine
        assert engine is not None

        def restart() -> None:
            engine.repeat_shard(shard)

        def rehearse(batch: Any) -> Seen:
            returned = loss(self._model, batch)
            seen = _numbers(returned, num_samples)
            engine.differentiate_again(returned, num_samples, share)
            updated = updated_parameters(self._model, self._run.kept.optimizer)
            return seen | {
                _GRADIENT.format(name): bits_of(parameter.grad)
                for name, parameter in updated.items()
                if parameter.grad is not None
            }

        def count() -> Seen:
            with self._gradients() as gradients:
                returned = loss(self._model, batch)
                seen = _numbers(returned, num_samples)
                step.backward(returned)
            return seen | gradients

        self._twice(batch, rehearse, count, restart, engine.check_passes)

    def watched(
        self, step: Step, embed: Compute, loss: Compute, *, is_due: bool
    ) -> list[Callable[[Any], Any]]:
        """Give what :meth:`Step.gather` takes; if it is due, the first call of each is checked."""
        engine = self._run.engine
        assert engine is not None
        restarts = (
            lambda: engine.repeat_shard(step.waiting[0]),
            lambda: engine.passes.seed("whole batch"),
        )
        functions = [partial(function, self._model) for function in (embed, loss)]
        if not (is_due and self.is_exact):
            return [*functions]
        return list(map(self._first_call_twice, functions, restarts))

    def _first_call_twice(
        self, function: Callable[[Any], Any], restart: Callable[[], None]
    ) -> Callable[[Any], Any]:
        calls = iter([True])

        def call(given: Any) -> Any:
            if next(calls, None) is None:
                return function(given)
            found: list[Any] = []

            def count() -> Seen:
                found.append(function(given))
                return leaves_of(found[0])

            self._twice(given, lambda given: leaves_of(function(given)), count, restart)
            return found[0]

        return call

    def _twice(
        self,
        given: Any,
        rehearse: Callable[[Any], Seen],
        count: Callable[[], Seen],
        restart: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute from a copy, then from what is given, and compare.

        Args:
            rehearse: gives what a pass over a copy comes to.
            count: likewise, of the pass that counts.
            restart: makes random numbers and buffers those before.
            check: refuses other things that a pass must not do, with words of its own.
        """
        rehearsed: Seen | None = None
        with suppress(Exception):  # the pass that counts will raise it, too
            spare = tree_map(copied, given)
            counted_before = states_of(self.look().metrics)
            try:
                with as_another_worker(self._run.team.world):
                    rehearsed = rehearse(tree_map(copied, given))
            finally:
                for metric, name, value in counted_before:
                    setattr(metric, name, value)
        first = None if rehearsed is None else self.look()
        restart()
        counted = count()
        if rehearsed is None or first is None or not _is_finite(counted):
            return  # that is explained where the step fails
        check()

        def again(elsewhere: AbstractContextManager[None] | None = None) -> Seen:
            seen: Seen = {}
            restart()
            with suppress(Exception), elsewhere or nullcontext():
                seen = rehearse(tree_map(copied, spare))
            restart()
            return seen

        self.compare(first, rehearsed, counted, again)

    @property
    def is_exact(self) -> bool:
        """Whether what is computed twice has the same bits."""
        run = self._run
        return (run.options.exact or run.device.is_host) and not run.kinds

    def look(self) -> Look:
        """Look at what the program keeps now."""
        return Look(self._model, self._functions)

    @contextmanager
    def _gradients(self) -> Iterator[Seen]:
        """Note the gradients of the backward pass within a block."""
        seen: Seen = {}

        def note(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                seen[_GRADIENT.format(name)] = bits_of(parameter.grad)

        updated = updated_parameters(self._model, self._run.kept.optimizer)
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(note, name))  # type: ignore[no-untyped-call]
            for name, parameter in updated.items()
            if parameter.requires_grad
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def compare(
        self, first: Look, rehearsed: Seen, counted: Seen, again: Callable[..., Seen]
    ) -> None:
        """Refuse what goes on from the first of two passes to the second, or differs in them.

        Args:
            first: between them.
            rehearsed: what one came to that was computed as by another worker.
            counted: what the other one came to.
            again: computes the same once more, maybe within a context.
        """
        self._check_kept(first, again)
        both = rehearsed.keys() & counted.keys()
        differs = next(
            (name for name in rehearsed if name in both and rehearsed[name] != counted[name]), None
        )
        if differs is None:
            return
        if again() == counted and again(as_another_worker(self._run.team.world)) != counted:
            raise RuntimeError(
                f"{_MUST} {differs} is another one where RANK and WORLD_SIZE are another worker's: "
                f"{_OF_RANKS}"
            )
        raise RuntimeError(
            f"{_MUST} computed twice, from the same samples, random numbers, parameters and "
            f"buffers, {differs} is another one: look for what they keep from shard to shard, take "
            f"from the time or draw from a generator that cannot be found; {_IN_TIME}"
        )

    def _check_kept(self, first: Look, again: Callable[[], Seen]) -> None:
        """Refuse what the program keeps and has changed from pass to pass."""
        second = self.look()
        ways = first.changed_in(second)
        for way in ways:
            if not second.put_back(way, first.values[way]):
                is_plain = isinstance(first.values[way], Plain)
                raise _goes_on(way, _IN_TIME if is_plain else _OF_TENSORS)
        if not ways:
            return
        # From the same value to the same again: else it is a time that is kept.
        again()
        third = self.look()
        for way in ways:
            if third.values.get(way) == second.values[way]:
                raise _goes_on(way, _IN_TIME)


def _goes_on(way: str, way_out: str) -> RuntimeError:
    return RuntimeError(
        f"{_MUST} `{way}` goes on from shard to shard, and each worker computes others: {way_out}"
    )


def _numbers(returned: Any, num_samples: int) -> Seen:
    """Give the scalars that a loss function has returned, so that NaN is like NaN."""
    numbers = read_loss(returned, num_samples).numbers()
    return {f"`{name}`": repr(number) for name, number in numbers.items()}


def _is_finite(seen: Seen) -> bool:
    return not any(word in seen.get("`loss`", "") for word in ("nan", "inf"))


def leaves_of(found: Any) -> Seen:
    """Give the tensors that a function has returned."""
    leaves = enumerate(tree_leaves(dict(found) if isinstance(found, Mapping) else found))
    return {f"result {at}": bits_of(leaf) for at, leaf in leaves if isinstance(leaf, torch.Tensor)}


@contextmanager
def as_another_worker(world: World) -> Iterator[None]:
    """Have `os.environ` say within a block that this is another worker, among one more.

    The process's own environment stays: a library's thread may read it meanwhile.
    """
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    numbers = (world.rank, world.local_rank, world.world_size, world.local_world_size)
    of_python = os.environ._data  # type: ignore[attr-defined]
    before = dict(of_python)
    context().held = world  # nobody joins the others under another number
    try:
        for name, number in zip(names, numbers, strict=True):
            of_python[os.environ.encodekey(name)] = os.environ.encodevalue(str(number + 1))
        yield
    finally:
        context().held = None
        for name in map(os.environ.encodekey, names):
            of_python.pop(name, None)
            if name in before:
                of_python[name] = before[name]


def copied(leaf: Any) -> Any:
    """Copy what a batch consists of, as it lies in memory; without a graph."""
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    spanned = 1 + sum((n - 1) * by for n, by in zip(leaf.shape, leaf.stride(), strict=True))
    if not leaf.numel() or spanned > 4 * leaf.numel():
        return leaf.detach().clone()
    flat = leaf.detach().as_strided((spanned,), (1,)).clone()
    return flat.as_strided(leaf.shape, leaf.stride())
