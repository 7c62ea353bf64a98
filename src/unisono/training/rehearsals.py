"""Is what a pass computes a function of its samples? Rehearsed, now and then, and compared.

Other workers compute other shards, in another order, so a loss function or a model that remembers
its calls gives other results on each number of workers. Before a worker's first shard is computed,
it is rehearsed twice, from the same samples, random numbers, parameters and buffers, once as if
RANK and WORLD_SIZE were another worker's (``repeated.py``).

So a counter, a list or a queue is named before it changes anything; whatever else differs shows in
the loss, in metrics or in gradients. It is done in the first two steps of a loop, as what is kept
of another shard may tell only in the second, and in one of 1,024 later: 0.2 % of the time at most.

The body of a loop of the program's own is not run again, as what it counts is its own. There the
first call of each model in a step is rehearsed, with nothing kept for a backward pass, and its
variables are watched (``loop_body.py``).

In passes without training the first two calls of each function are: what only validations count,
as objects of torchmetrics do, would be each worker's own, too.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from unisono.engine.state.contents import buffers_put_back, updated_parameters
from unisono.engine.step.loss import read_loss
from unisono.runtime.held import Held, hashed
from unisono.runtime.reach import Holder, OwnGenerators, reach
from unisono.runtime.repeated import Orders, Seen, culprit, difference, what_goes_on
from unisono.runtime.workers.context import as_another_worker
from unisono.training.own_hook import OwnHook
from unisono.training.run_context import RunContext
from unisono.training.step import Step

AT_FIRST, EVERY = 2, 1024  # steps
_WHOLE = 32 << 20  # bytes of a tensor; of a larger one some are looked at
_MUST = "the loss function and the model must depend on the shard alone, but"
_IN_TIME = (
    "take the step from `unisono.progress()`, set a value in `on_step_begin`, return metrics in a "
    "dict, or keep a buffer of the model (`register_buffer`)."
)
_OF_SAMPLES = (
    'return values of each sample as `"per_sample"` and change it in `on_step_end`, with those of '
    "the whole batch."
)
_OF_TENSORS = (
    f"keep a buffer of the model (`register_buffer`), return metrics in a dict, or {_OF_SAMPLES}"
)
_OF_METRICS = (
    "return means in a dict, and give functions of all rows, or objects of torchmetrics, to "
    "`fit(validate_metrics=…)` and `evaluate(metrics=…)`."
)

Compute = Callable[[nn.Module, Any], Any]
Rehearse = Callable[..., Seen]
"""Computes as the pass will; within the context that it may be given, such as another worker's."""


class _Earlier(NamedTuple):
    """What was rehearsed in the first step."""

    before: Held  # it
    written: list[str]  # by it
    shapes: list[torch.Size]  # of the batch's tensors
    compute: Callable[[], Seen]


class Rehearsals:
    """Rehearses passes of one loop. Final.

    `functions` are the program's, by name. If the process `reads_here`, samples can be read again.
    A `model` is given for passes without training.
    """

    def __init__(
        self,
        run: RunContext,
        functions: Mapping[str, Compute | None],
        model: nn.Module | None = None,
        *,
        reads_here: bool = False,
    ) -> None:
        self._run, self._reads_here, self._trains = run, reads_here, model is None
        self._model = run.kept.model if model is None else model
        self._earlier: dict[str, _Earlier | None] = {}
        self._functions = {name: _programs(of) for name, of in functions.items() if of is not None}

    def close(self) -> None:
        """Keep nothing of the loop any more, where its second step has not come."""
        self._earlier.clear()

    def compute(self, step: Step, batch: Any, loss: Compute) -> None:
        """Compute the shard at hand, after rehearsals of it; refuses what is no function of it."""
        if not self.is_exact:
            step.backward(loss(self._model, batch))
            return
        shard, num_samples, share = step.waiting
        engine = self._run.engine
        assert engine is not None
        updated = updated_parameters(self._model, self._run.kept.optimizer)

        def rehearse(batch: Any) -> Seen:
            returned = read_loss(loss(self._model, batch), num_samples)
            # As text, so that NaN is like NaN.
            seen = {f"`{name}`": repr(number) for name, number in returned.numbers().items()}
            engine.passes.differentiate(returned, share)
            return seen | {
                f"the gradient of `{name}`": hashed(parameter.grad, _WHOLE)
                for name, parameter in updated.items()
                if parameter.grad is not None
            }

        before, spare = self.look(), _spare(batch)
        restart = partial(engine.passes.repeat, shard)
        self._rehearse("loss", rehearse, restart, spare, engine.check_passes)
        step.backward(loss(self._model, batch))
        if self._reads_here and spare is not None:
            self._check_reading(before, batch, spare, partial(step.read_again, shard))

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
        return list(map(self._first_rehearsed, restarts, functions, restarts.values()))

    def _first_rehearsed(
        self, name: str, function: Callable[[Any], Any], restart: Callable[[], None]
    ) -> Callable[[Any], Any]:
        calls = iter([True])

        def rehearse(given: Any) -> Seen:
            return _leaves_of(function(given))

        def call(given: Any) -> Any:
            if next(calls, False):
                self._rehearse(name, rehearse, restart, _spare(given))
            return function(given)

        return call

    def _rehearse(
        self,
        name: str,
        function: Callable[[Any], Seen],
        restart: Callable[[], None],
        spare: Any,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute from copies of `spare`, and compare.

        `restart` makes random numbers and buffers those before, `check` refuses what a pass must
        not do in words of its own.
        """
        before = self.look()

        def compute() -> Seen:
            return function(tree_map(_copied, spare))

        def rehearse(
            elsewhere: AbstractContextManager[None] | None = None,
            compute: Callable[[], Seen] = compute,
        ) -> Seen:
            restart()
            seen: Seen = {}
            with suppress(Exception), elsewhere or nullcontext():
                seen = compute()
            restart()
            return seen

        once = rehearse()
        first = self.look()
        if not once or any(word in once.get("`loss`", "") for word in ("nan", "inf")):
            return  # that is explained where the step fails
        check()
        self._compare(once, first, rehearse)
        written = before.written_in(self.look())
        now = _Earlier(before, written, [leaf.shape for leaf in _tensors_in(spare)], compute)
        earlier = self._earlier.setdefault(name, now)
        if earlier is None or earlier is now:
            return
        self._earlier[name] = None
        if ways := [*dict.fromkeys([*earlier.written, *written])]:
            is_alike = earlier.shapes == now.shapes
            orders = Orders(earlier.before, ways, self.look, is_alike)
            one = partial(rehearse, compute=earlier.compute)
            if way := orders.what_goes_on(one, rehearse, once):
                raise self._goes_on(way, self.look())

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Have the first call of each model of the run rehearsed within a block."""
        model, run = self._model, self._run
        named = dict(model.named_children()) if type(model) is nn.ModuleDict else {"": model}
        with ExitStack() as stack:
            for name, each in named.items():
                is_compiled = isinstance(each, torch.jit.ScriptModule) or hasattr(each, "_orig_mod")
                if self.is_exact and not is_compiled and not run.device.is_divided:
                    begin = OwnHook(partial(self._rehearse_call, name, iter([True])))
                    hook = each.register_forward_pre_hook(begin, with_kwargs=True)
                    stack.callback(hook.remove)
            yield

    def _rehearse_call(
        self, name: str, first: Iterator[bool], model: nn.Module, args: Any, kwargs: Any
    ) -> None:
        engine = self._run.engine
        if engine is None or not next(first, False):
            return
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        there = frozen | dict(model.named_buffers())
        before = {name: value.detach().clone() for name, value in there.items()}
        nothing = torch.empty(0, device=engine.exchange.device.torch)

        def call(given: Any) -> Seen:
            args, kwargs = given
            unsaved = torch.autograd.graph.saved_tensors_hooks(lambda _: nothing, lambda _: nothing)
            with engine.passes.generators_put_back(), unsaved:
                return _leaves_of(model.forward(*args, **kwargs))

        def restart() -> None:
            now = dict(model.named_parameters()) | dict(model.named_buffers())
            for name, value in before.items():
                now[name].data.copy_(value)

        self._rehearse(f"model {name}", call, restart, _spare((args, kwargs)))

    @staticmethod
    def without_training(
        run: RunContext, name: str, function: Compute, calls: dict[Any, Iterator[int]]
    ) -> Compute:
        """Have the next `calls` of a function rehearsed, in passes without training."""
        of_program = _programs(function)
        left = calls.setdefault(getattr(of_program, "__code__", of_program), iter(range(AT_FIRST)))
        rehearsals: Rehearsals | None = None

        @wraps(function)
        def call(model: nn.Module, batch: Any) -> Any:
            nonlocal rehearsals
            if next(left, None) is not None:
                rehearsals = rehearsals or Rehearsals(run, {name: function}, model)
                rehearsals._rehearse_pass(name, function, batch)
            return function(model, batch)

        return call

    def _rehearse_pass(self, name: str, function: Compute, batch: Any) -> None:
        if not self.is_exact:
            return
        own = OwnGenerators(model=self._model, **self._functions)
        own.look()

        def call(given: Any) -> Seen:
            with self._run.device.generators_put_back(), own.put_back():
                return _leaves_of(function(self._model, given))

        with buffers_put_back(self._model) as restart:
            self._rehearse(name, call, restart, _spare(batch))

    def _compare(self, once: Seen, first: Held, again: Rehearse) -> None:
        """Refuse what goes on from one computation to the next, or differs in them."""
        seen = again(as_another_worker(self._run.team.world))
        if way := what_goes_on(first, self.look, again):
            raise self._goes_on(way, first)
        differs = difference(once, seen)
        if differs is None:
            return
        if again() == once and again(as_another_worker(self._run.team.world)) != once:
            raise RuntimeError(
                f"{_MUST} {differs} is another one where RANK and WORLD_SIZE are another worker's: "
                f"compute the same on every worker; for what one worker alone is to do, write a "
                f"callback that asks for `fit.is_leader`."
            )
        raise RuntimeError(
            f"{_MUST} computed twice, from the same samples, random numbers, parameters and "
            f"buffers, {differs} is another one: look for what they keep from shard to shard, take "
            f"from the time or draw from a generator that cannot be found; {_IN_TIME}"
        )

    def _check_reading(self, before: Held, batch: Any, spare: Any, read: Callable[[], Any]) -> None:
        """Refuse what passes that got `spare` have changed, if samples read then are others."""
        known = hashed(spare, _WHOLE)
        ways, is_in_place = before.written_in(self.look()), hashed(batch, _WHOLE) != known
        if not (ways or is_in_place):
            return
        told = hashed(read(), _WHOLE)
        if told == known or told != hashed(read(), _WHOLE):
            return
        if is_in_place:
            raise RuntimeError(
                f"{_MUST} they change their batch in place, and with it the data set, as "
                f"`collate_fn` or `__getitem__` gives out its own memory: clone the tensors there, "
                f"or write `x = x - mean` in place of `x -= mean`."
            )
        way = culprit(ways, before, self.look(), lambda: hashed(read(), _WHOLE) == known)
        raise RuntimeError(
            f"{_MUST} they change `{way}`, which the data set reads, and each worker computes "
            f"others: {_OF_SAMPLES}"
        )

    @property
    def is_exact(self) -> bool:
        """Whether what is computed again has the same bits."""
        return self._run.options.exact or self._run.device.is_host

    def own(self) -> set[int]:
        """Give the identities of what the model has."""
        model = self._model
        return set(map(id, itertools.chain(model.parameters(), model.buffers(), model.modules())))

    def look(self) -> Held:
        """Look at what the program keeps now, beside the model's parameters and buffers."""
        model, own = self._model, self.own()
        holders = reach({"model": model, **self._functions}).holders
        held = Held(holders, own, at_most=_WHOLE)
        for way, value in held.others.items():
            if isinstance(value, nn.Module):  # such as a teacher
                for part, parameter in value.named_parameters():
                    if id(parameter) not in own:
                        held.note(Holder(way, lambda: iter(())), f".{part}", parameter)
        return held

    def _goes_on(self, way: str, held: Held) -> RuntimeError:
        """Make the refusal of what is kept from shard to shard."""
        remedy = _IN_TIME if held.is_plain(way) else _OF_TENSORS
        if not self._trains or way.endswith("._update_count"):
            remedy = _OF_METRICS
        return RuntimeError(
            f"{_MUST} `{way}` goes on from shard to shard, and each worker computes others: "
            f"{remedy}"
        )


def _leaves_of(found: Any) -> Seen:
    """Give the tensors that a function has returned."""
    tree = dict(found) if isinstance(found, Mapping) else found
    return {f"result {at}": hashed(leaf, _WHOLE) for at, leaf in enumerate(_tensors_in(tree))}


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _spare(given: Any) -> Any:
    """Copy what something is computed from; None if that cannot be done."""
    with suppress(Exception):
        return tree_map(_copied, given)
    return None


def _copied(leaf: Any) -> Any:
    """Copy what a batch consists of, as it lies in memory; without a graph."""
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    spanned = 1 + sum((n - 1) * by for n, by in zip(leaf.shape, leaf.stride(), strict=True))
    if not leaf.numel() or spanned > 4 * leaf.numel():
        return leaf.detach().clone()
    flat = leaf.detach().as_strided((spanned,), (1,)).clone()
    return flat.as_strided(leaf.shape, leaf.stride())


def _programs(function: Any) -> Any:
    """Give the program's own function, which ours may be around."""

    def is_own(function: Any) -> bool:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        return not module.startswith("unisono.")

    return inspect.unwrap(function, stop=is_own)
