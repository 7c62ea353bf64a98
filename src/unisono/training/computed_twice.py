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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unisono.engine.state.contents import updated_parameters
from unisono.engine.step.loss import read_loss
from unisono.runtime.held import Held, hashed
from unisono.runtime.workers.context import context
from unisono.runtime.world import World
from unisono.training.kept_outside import (
    IN_TIME,
    MUST,
    OF_SAMPLES,
    WHOLE,
    Histories,
    Seen,
    culprit,
    difference,
    goes_on,
    look,
    metrics_put_back,
    tensors_in,
)
from unisono.training.run_context import RunContext
from unisono.training.step import Step

AT_FIRST, EVERY = 2, 1024  # steps
_GRADIENT = "the gradient of `{}`"
_OF_RANKS = (
    "compute the same on every worker; for what one worker alone is to do, write a callback that "
    "asks for `fit.is_leader`."
)

Compute = Callable[[nn.Module, Any], Any]


class _Passes(NamedTuple):
    """What is computed twice."""

    name: str
    rehearse: Callable[[Any], Seen]  # gives what a pass over a copy comes to
    computed: Callable[[], Seen]  # likewise, of the pass that counts
    restart: Callable[[], None]  # makes random numbers and buffers those before
    check: Callable[[], None] = lambda: None  # refuses what a pass must not do in words of its own
    read_again: Callable[[], Any] | None = None  # gives the batch anew


class _Earlier(NamedTuple):
    """What was computed twice in the first step."""

    before: Held  # it
    written: list[str]  # by it
    shapes: list[torch.Size]  # of the batch's tensors
    rehearse: Callable[[], Seen]


class ComputedTwice:
    """Looks at the passes of one call of ``fit``. Final.

    Args:
        run: which is trained.
        functions: the loss function, and what gives features where there is such a one.
        reads_here: whether this process reads samples, which can be read again.
    """

    def __init__(
        self, run: RunContext, *functions: Compute | None, reads_here: bool = False
    ) -> None:
        self._run, self._model, self._reads_here = run, run.kept.model, reads_here
        self._earlier: dict[str, _Earlier | None] = {}
        self._functions = [function for function in functions if function is not None]

    def close(self) -> None:
        """Keep nothing of the loop any more, where its second step has not come."""
        self._earlier.clear()

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
            engine.passes.repeat(shard)

        def rehearse(batch: Any) -> Seen:
            returned = loss(self._model, batch)
            seen = _numbers(returned, num_samples)
            engine.passes.differentiate(read_loss(returned, num_samples), share)
            updated = updated_parameters(self._model, self._run.kept.optimizer)
            return seen | {
                _GRADIENT.format(name): hashed(parameter.grad, WHOLE)
                for name, parameter in updated.items()
                if parameter.grad is not None
            }

        def count() -> Seen:
            with self._gradients() as gradients:
                returned = loss(self._model, batch)
                seen = _numbers(returned, num_samples)
                step.backward(returned)
            return seen | gradients

        read_again = partial(step.read_again, shard) if self._reads_here else None
        passes = _Passes("loss", rehearse, count, restart, engine.check_passes, read_again)
        self._twice(passes, batch)

    def watched(
        self, step: Step, embed: Compute, loss: Compute, *, is_due: bool
    ) -> list[Callable[[Any], Any]]:
        """Give what :meth:`Step.gather` takes; if it is due, the first call of each is checked."""
        engine = self._run.engine
        assert engine is not None
        restarts = {
            "embed": lambda: engine.passes.repeat(step.waiting[0]),
            "loss": lambda: engine.passes.seed("whole batch"),
        }
        functions = [partial(function, self._model) for function in (embed, loss)]
        if not (is_due and self.is_exact):
            return [*functions]
        return list(map(self._first_call_twice, restarts, functions, restarts.values()))

    def _first_call_twice(
        self, name: str, function: Callable[[Any], Any], restart: Callable[[], None]
    ) -> Callable[[Any], Any]:
        calls = iter([True])

        def call(given: Any) -> Any:
            if next(calls, None) is None:
                return function(given)
            found: list[Any] = []

            def count() -> Seen:
                found.append(function(given))
                return leaves_of(found[0])

            passes = _Passes(name, lambda given: leaves_of(function(given)), count, restart)
            self._twice(passes, given)
            return found[0]

        return call

    def _twice(self, passes: _Passes, given: Any) -> None:
        """Compute from a copy, then from what is given, and compare."""
        before, spare = self.look(), None
        with suppress(Exception):  # the rehearsal fails then, too
            spare = tree_map(copied, given)

        def compute(
            rehearse: Callable[[], Seen], elsewhere: AbstractContextManager[None] | None = None
        ) -> Seen:
            passes.restart()
            seen: Seen = {}
            with suppress(Exception), metrics_put_back(before), elsewhere or nullcontext():
                seen = rehearse()
            passes.restart()
            return seen

        def rehearse() -> Seen:
            return passes.rehearse(tree_map(copied, spare))

        again = partial(compute, rehearse)
        rehearsed = again(as_another_worker(self._run.team.world))
        first = self.look()
        counted = passes.computed()
        if not rehearsed or not _is_finite(counted):
            return  # that is explained where the step fails
        passes.check()
        if passes.read_again is not None and hashed(given, WHOLE) != hashed(spare, WHOLE):
            _check_batch(hashed(spare, WHOLE), passes.read_again)
        self.compare(first, rehearsed, counted, again)
        written = before.written_in(self.look())
        if written and passes.read_again is not None:
            self._check_reading(before, written, hashed(spare), passes.read_again)
        now = _Earlier(before, written, [leaf.shape for leaf in tensors_in(spare)], rehearse)
        earlier = self._earlier.setdefault(passes.name, now)
        if earlier is None or earlier is now:
            return
        self._earlier[passes.name] = None
        if ways := [*dict.fromkeys([*earlier.written, *written])]:
            is_alike = earlier.shapes == now.shapes
            histories = Histories(earlier.before, ways, self.look, is_alike=is_alike)
            histories.check(partial(compute, earlier.rehearse), again, counted)

    def _check_reading(
        self, before: Held, ways: Sequence[str], known: str, read: Callable[[], Any]
    ) -> None:
        """Refuse what passes have changed, if samples that are read then are others."""
        told = hashed(read())
        if told == known or told != hashed(read()):
            return
        now = self.look()
        way = culprit(ways, before, now, lambda: hashed(read()) == known)
        raise RuntimeError(
            f"{MUST} they change `{way}`, which the data set reads, and each worker computes "
            f"others: {OF_SAMPLES}"
        )

    @property
    def is_exact(self) -> bool:
        """Whether what is computed twice has the same bits."""
        run = self._run
        return (run.options.exact or run.device.is_host) and not run.kinds

    def look(self) -> Held:
        """Look at what the program keeps now."""
        return look(self._model, self._functions)

    @contextmanager
    def _gradients(self) -> Iterator[Seen]:
        """Note the gradients of the backward pass within a block."""
        seen: Seen = {}

        def note(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                seen[_GRADIENT.format(name)] = hashed(parameter.grad, WHOLE)

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
        self, first: Held, rehearsed: Seen, counted: Seen, again: Callable[..., Seen]
    ) -> None:
        """Refuse what goes on from the first of two passes to the second, or differs in them.

        Args:
            first: between them.
            rehearsed: what one came to that was computed as by another worker.
            counted: what the other one came to.
            again: computes the same once more, maybe within a context.
        """
        self._check_kept(first, again)
        differs = difference(rehearsed, counted)
        if differs is None:
            return
        if again() == counted and again(as_another_worker(self._run.team.world)) != counted:
            raise RuntimeError(
                f"{MUST} {differs} is another one where RANK and WORLD_SIZE are another worker's: "
                f"{_OF_RANKS}"
            )
        raise RuntimeError(
            f"{MUST} computed twice, from the same samples, random numbers, parameters and "
            f"buffers, {differs} is another one: look for what they keep from shard to shard, take "
            f"from the time or draw from a generator that cannot be found; {IN_TIME}"
        )

    def _check_kept(self, first: Held, again: Callable[[], Seen]) -> None:
        """Refuse what the program keeps and has changed from pass to pass."""
        second = self.look()
        ways = first.changed_in(second)
        if not ways:
            return
        for way in first.written_in(second):
            first.put_back(way, second)
        there = self.look()
        for way in ways:
            if there.values.get(way) != first.values[way]:
                raise goes_on(way, first)  # it cannot be put back
        # From the same value to the same again: else it is a time that is kept.
        again()
        third = self.look()
        for way in ways:
            if third.values.get(way) == second.values[way]:
                raise goes_on(way, first)


def _check_batch(known: str, read: Callable[[], Any]) -> None:
    """Refuse a pass that changes its batch in place, if the data set has changed with it."""
    told = hashed(read(), WHOLE)
    if told != known and told == hashed(read(), WHOLE):
        raise RuntimeError(
            f"{MUST} they change their batch in place, and with it the data set, as `collate_fn` "
            f"or `__getitem__` gives out its own memory: clone the tensors there, or write "
            f"`x = x - mean` in place of `x -= mean`."
        )


def _numbers(returned: Any, num_samples: int) -> Seen:
    """Give the scalars that a loss function has returned, so that NaN is like NaN."""
    numbers = read_loss(returned, num_samples).numbers()
    return {f"`{name}`": repr(number) for name, number in numbers.items()}


def _is_finite(seen: Seen) -> bool:
    return not any(word in seen.get("`loss`", "") for word in ("nan", "inf"))


def leaves_of(found: Any) -> Seen:
    """Give the tensors that a function has returned."""
    tree = dict(found) if isinstance(found, Mapping) else found
    return {f"result {at}": hashed(leaf, WHOLE) for at, leaf in enumerate(tensors_in(tree))}


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
