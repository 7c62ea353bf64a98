"""Is what a pass computes a function of its samples? Rehearsed in some steps, and compared.

Workers compute different shards, in different orders, so a loss function or a model that remembers
its calls would give different results on different numbers of workers. Before a worker computes its
first shard, it rehearses the shard from the same samples, random numbers, parameters and buffers:
once with another worker's RANK and WORLD_SIZE, and after passes over other samples and with other
weights (``rehearsal.py``). Everything that the rehearsals change is restored. Once passes were seen
to write to nothing, one pass is rehearsed, and compared with the shard's own.

The first two steps are rehearsed, and those whose numbers are powers of two or multiples of 1024: a
dependence that begins late is found late. In passes without training, the calls of a function with
such numbers are rehearsed. In a custom loop, the first shard's batch is yielded again at the end,
and must give the same loss.
"""

from __future__ import annotations

import itertools
import operator
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, wraps
from types import FrameType, MappingProxyType
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.state.contents import buffers_put_back, updated_parameters
from unisono.engine.state.optimizers import optimizers_of
from unisono.engine.step.loss import ShardLoss, read_loss
from unisono.engine.step.transforms import Gradients
from unisono.errors import MismatchError
from unisono.programs.account import Account, ChangedPlace, over_memory_of
from unisono.programs.carry import Known
from unisono.programs.frames import KeptFrame, frame_of, kept_frame
from unisono.programs.generators import OwnGenerators
from unisono.programs.hashes import hashed
from unisono.programs.holders import SETTINGS, Holder
from unisono.programs.live import frames_of_loop
from unisono.programs.rehearsal import Dependence, Rehearsal, Seen, difference, is_same
from unisono.programs.settings import SETTINGS_OF_PROCESS
from unisono.programs.unlike import Unlike, as_there, depends_on_unlike, values_unlike
from unisono.programs.walk import Walk, is_of_a_library, is_of_program, programs_own
from unisono.runtime.device import generator_states, set_generator_states
from unisono.runtime.workers.other_rank import as_another_worker
from unisono.runtime.workers.team import Team
from unisono.training.body_rehearsal import BodyRehearsal
from unisono.training.refusals import (
    IMPORTED_LINE,
    OF_BODY_LINE,
    OF_PASSES_LINE,
    OF_TORCHMETRICS,
    changes_batch,
    changes_samples,
    reads_stored,
    reads_sum,
    refusal,
)
from unisono.training.run_context import RunContext
from unisono.training.spare_batches import hash_of, hashes_of_leaves, spare_copy
from unisono.training.step import AT_FIRST, Step, is_due

_SAMPLED = 4096  # bytes of a parameter
_OTHERWISE = 1 << 20  # bytes of weights that are changed temporarily

Compute = Callable[[nn.Module, Any], Any]


@final
class Rehearsals:
    """Rehearses passes of one loop.

    `functions` are the program's, by name; `reads` is what samples are read from. Pass a `model`
    for passes without training.
    """

    def __init__(
        self,
        run: RunContext,
        functions: Mapping[str, Compute | None],
        model: nn.Module | None = None,
        *,
        can_read: bool = False,
        reads: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._run, self._can_read, self._trains = run, can_read, model is None
        self._reads = reads
        self._model = run.kept.model if model is None else model
        self._begun: dict[str, Account] = {}  # before the first rehearsal
        self._modules = {*sys.modules}
        self._written: dict[str, set[tuple[int, str]]] = {}  # by the passes that wrote
        self._earlier: dict[str, Callable[[], Seen]] = {}  # earlier rehearsals
        self._functions = {n: programs_own(of) for n, of in functions.items() if of is not None}
        self._before: Account | None = None  # the passes of this step
        self._inner: Sequence[KeptFrame] = ()  # those that take batches
        self._walk: Walk | None = None  # the newest one
        self._last: Account | None = None  # of it
        self._known: tuple[Walk, Account] | None = None  # the walk before
        self.stored: list[Account] = []  # what passes stored, after each shard

    def close(self) -> None:
        """Release what is kept for the loop."""
        self._earlier.clear()
        self._known = self._last = None
        self._begun.clear()
        self.stored.clear()

    def begin(self) -> None:
        """Record what the program keeps before a step's samples are read."""
        self.stored.clear()
        self._before = self.account()

    def compute(self, step: Step, batch: Any, loss: Compute) -> None:
        """Rehearse this shard, then compute it; raise if it is not a function of its samples."""
        if not self.is_exact:
            step.backward(loss(self._model, batch))
            return
        shard, num_samples, share = step.waiting
        engine = self._run.engine
        assert engine is not None
        updated = updated_parameters(self._model, self._run.kept.optimizer)

        def numbers(loss: ShardLoss) -> dict[str, Any]:
            # As text, so that NaN equals NaN.
            return {f"`{name}`": repr(number) for name, number in loss.numbers().items()}

        def gradients() -> dict[str, Any]:
            return {
                f"the gradient of `{name}`": hash_of(parameter.grad)
                for name, parameter in updated.items()
                if parameter.grad is not None
            }

        def rehearse(batch: Any) -> Seen:
            returned = read_loss(loss(self._model, batch), num_samples)
            seen = numbers(returned)
            engine.passes.differentiate(returned, share)
            return seen | gradients()

        before, spare = self._account_again(), spare_copy(batch)
        restart = self._drawing_as_now(partial(engine.repeat, shard))
        check = engine.check_passes
        rehearsed = partial(self._rehearse, "loss", rehearse, restart, spare, check)
        elsewhere = self._once_elsewhere("loss", before, rehearse, restart, spare, check)
        if not elsewhere:
            rehearsed()
        returned, seen = loss(self._model, batch), dict[str, Any]()

        def look() -> None:
            seen.update(numbers(read_loss(returned, num_samples)) | gradients())

        with engine.passes.looked_at(look if elsewhere else None):
            step.backward(returned)
        if difference(elsewhere, seen):
            rehearsed()  # finds out why
            engine.passes.leave_shards()
        if before.changes():
            self.stored.append(self.account())
            if self._can_read and spare is not None:
                self._check_reading(before, batch, spare, partial(step.read_again, shard))
        elif self._can_read and spare is not None:
            self._check_in_place(batch, spare, partial(step.read_again, shard))

    def note_stored(self) -> None:
        """Record what the step's passes stored, once all passes of this worker are done."""
        before, self._before, self._walk = self._before, None, None
        if before is not None:
            self._take_out(before)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore what the program keeps after the block, whose passes only look at something."""
        before = self.account()
        try:
            yield
        finally:
            before.put_back()

    def of_body(self, taking: FrameType) -> BodyRehearsal:
        """Return what repeats the first shard of a custom loop. Collective.

        `taking` is the frame that takes the batches.
        """
        assert self._run.frame is not None
        outer = self._run.frame, *self._run.takers
        frames = map(kept_frame, frames_of_loop(taking, frame_of(self._run.frame)))
        self._inner = [one for one in frames if one not in outer and is_of_program(one)]
        copied = spare_copy if self.is_exact else (lambda batch: None)
        body = BodyRehearsal(
            self.account,
            copied,
            self._refusal,
            self._take_out_of_body,
            lambda: as_another_worker(self._run.team.world),
            self._unlike_in,
        )
        assert self._walk is not None
        assert self._run.engine is not None
        known = self._run.engine.passes.own_generators
        body.watch({p: one for p, one in self._walk.generators.items() if id(one) not in known})
        return body

    def _unlike_in(self, account: Account) -> list[Unlike]:
        """Return values of the program's loop that differ between workers. Collective."""
        is_everybodys = is_due(AT_FIRST, self._run.kept.position.step)
        places = partial(self._places_of, account)
        if not is_everybodys:
            return []
        return values_unlike(self._run.team, places, self._run.say_once)

    def places(self) -> tuple[list[Holder], Known]:
        """Return the places that passes read, and the program's objects."""
        return self._places_of(self.account())

    def _places_of(self, account: Account) -> tuple[list[Holder], Known]:
        walk = self._walk
        assert walk is not None
        return account.holders, Known(walk.things, walk.names, dict)

    def _take_out_of_body(self, before: Account) -> None:
        changes = self._take_out(before)
        # Engines register hooks, which torch numbers.
        of_program = (each for each in changes if each.holder.kind is not SETTINGS)
        paths = [path for each in of_program for path in each.numbers()]
        if paths:
            self._run.say_once(OF_BODY_LINE.format(paths[0]))

    def _take_out(self, before: Account) -> list[ChangedPlace]:
        changes, engine = before.changes(), self._run.engine
        for written in self._written.values():
            written.update(change.holder.identity for change in changes)
        if self._run.program_kept is not None:
            self._run.program_kept.stored_in_passes(changes)
        assert engine is not None
        moments = [before, *self.stored] if changes else []
        engine.watch_gradients(partial(self._watch_gradients, moments))
        return changes

    def _watch_gradients(
        self,
        moments: Sequence[Account],
        leave: Callable[[Gradients], Gradients],
        gradients: Gradients,
    ) -> Callable[[Gradients], object] | None:
        """Check that `on_gradients` reads nothing that passes stored; return what compares it."""
        now = self.account()
        if moments:

            def left() -> Seen:
                with suppress(Exception):
                    made = leave(gradients)
                    return {f"the gradient of `{name}`": hashed(g) for name, g in made.items()}
                return {}

            known = left()
            now.put_back()
            for before in moments:
                for change in before.changes():
                    before.put_back(partial(operator.is_, change.holder))
                    differs = difference(known, left())
                    now.put_back()
                    if differs:
                        raise reads_stored(change.paths[0], differs)
        step = self._run.kept.position.step
        is_everybodys = is_due(AT_FIRST, step)  # workers may have checked different first steps
        return partial(_compare_gradients, self._run.team) if is_everybodys else None

    def watched(
        self, step: Step, embed: Compute, loss: Compute, *, is_due: bool
    ) -> list[Callable[[Any], Any]]:
        """Return the arguments of :meth:`Step.gather`; if it is due, first calls are rehearsed."""
        engine = self._run.engine
        assert engine is not None
        restarts = {
            "embed": lambda: engine.repeat(step.waiting[0]),
            "loss": lambda: engine.passes.seed("whole batch"),
        }
        functions = [partial(function, self._model) for function in (embed, loss)]
        if not (is_due and self.is_exact):
            return [*functions]
        first = partial(self._first_rehearsed, engine.check_passes)
        return list(map(first, restarts, functions, restarts.values()))

    def _first_rehearsed(
        self,
        check: Callable[[], None],
        name: str,
        function: Callable[[Any], Any],
        restart: Callable[[], None],
    ) -> Callable[[Any], Any]:
        calls = iter([True])

        def rehearse(given: Any) -> Seen:
            return hashes_of_leaves(function(given))

        def call(given: Any) -> Any:
            if next(calls, False):
                self._rehearse(name, rehearse, self._drawing_as_now(restart), spare_copy(given))
            return function(given)

        return call

    def _drawing_as_now(self, restart: Callable[[], None]) -> Callable[[], None]:
        """Return a `restart` that seeds in later steps as it does in this one."""
        engine = self._run.engine
        assert engine is not None
        restart()
        drawn = engine.passes.drawn()

        def restart_as_then() -> None:
            restart()
            engine.passes.draw_on(drawn, 0)

        return restart_as_then

    def _rehearse(
        self,
        name: str,
        function: Callable[[Any], Seen],
        restart: Callable[[], None],
        spare: Any,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute from copies of `spare` and compare; what the program keeps is restored.

        `restart` resets random numbers and buffers; `check` raises, with its own message, for what
        a pass must not do.
        """
        before, fixed = self._account_again(), self._fixed()
        begun = self._begun.setdefault(name, before)

        def compute(
            elsewhere: AbstractContextManager[None] | None = None, spare: Any = spare
        ) -> Seen:
            return self._computed(function, restart, spare, elsewhere or nullcontext())

        def with_other_weights(spare: Any) -> None:
            with _other_weights(self._model):
                compute(spare=spare)

        once = compute()
        for path in itertools.chain.from_iterable(each.paths for each in before.changes()):
            if path.endswith(OF_TORCHMETRICS):  # read later, after the passes
                raise self._refusal(Dependence(path, "what it computes"))
        if not once or any(word in once.get("`loss`", "") for word in ("nan", "inf")):
            before.put_back()
            return  # the failing step explains that
        check()
        earlier = self._earlier.get(name)
        others: dict[str, Callable[[], object]] = {}
        if earlier is not None:
            others["an earlier shard"] = earlier
        if self._trains:
            others["other weights"] = partial(with_other_weights, spare)
        self._earlier[name] = compute
        rehearsal = Rehearsal(
            self.account,
            compute,
            self._written.setdefault(name, set()),
            lambda: compute(as_another_worker(self._run.team.world)),
            others,
            self._tell_sums,
        )
        moments = [before] if begun is before else [before, begun]
        finding = rehearsal.judge(moments, once)
        if finding is not None:
            moved = [name for name, now in self._fixed().items() if fixed[name] != now]
            raise self._refusal(finding._replace(path=finding.path or "".join(moved[:1])))
        if not self._trains:
            self._check_sums(once, compute)
        unlike = self._run.unlike
        if unlike and (differs := difference(once, compute(as_there(unlike)))):
            culprits = (u for u in unlike if difference(once, compute(as_there([u]))))
            raise depends_on_unlike(next(culprits, unlike[0]), differs)
        before.put_back()
        restart()

    def _once_elsewhere(
        self,
        name: str,
        before: Account,
        function: Callable[[Any], Seen],
        restart: Callable[[], None],
        spare: Any,
        check: Callable[[], None] = lambda: None,
    ) -> Seen:
        """Compute once as another worker; empty if this would tell less than :meth:`_rehearse`."""
        if self._run.unlike or self._written.get(name) != set():
            return {}
        seen = self._computed(function, restart, spare, as_another_worker(self._run.team.world))
        if before.changes():
            before.put_back()
            return {}
        begun = self._begun[name]
        if begun.changes():
            with begun.restored():
                alone = self._computed(function, restart, spare, nullcontext())
            if difference(seen, alone):
                return {}
        if seen:
            check()
        return seen

    def _computed(
        self,
        function: Callable[[Any], Seen],
        restart: Callable[[], None],
        spare: Any,
        where: AbstractContextManager[None],
    ) -> Seen:
        """Compute from a copy of `spare`; nothing if that raises."""
        restart()
        seen = dict[str, Any]()
        with suppress(Exception), where:
            seen |= function(spare_copy(spare))
        restart()
        for module in sorted(sys.modules.keys() - self._modules):
            if not is_of_a_library(module):
                self._run.say_once(IMPORTED_LINE.format(module))
        return seen

    def _tell_sums(self, left: Account, grown: Sequence[ChangedPlace]) -> None:
        """Name a number that passes add to, as it is of this worker's shards alone."""
        paths = {
            path: change.holder
            for change in grown
            for path in change.numbers(left.content(change.holder))
        }
        for path in itertools.islice(paths, 1):
            self._run.say_once(OF_PASSES_LINE.format(path))
        if self._trains:
            for path, holder in paths.items():
                self._run.sums.setdefault(path, (holder, next(iter(self._begun.values()))))

    def _check_sums(self, known: Seen, compute: Callable[[], Seen]) -> None:
        """Raise if a pass without training depends on what those in training have added up."""
        for path, (holder, begun) in self._run.sums.items():
            now = Account([holder])
            begun.put_back(partial(is_same, holder))
            differs = difference(known, compute())
            now.put_back()
            if differs:
                raise reads_sum(path, differs)

    def _fixed(self) -> dict[str, str]:
        """Hash a sample of each parameter that no optimizer updates."""
        updated = updated_parameters(self._model, self._run.kept.optimizer)
        named = self._model.named_parameters()
        return {name: hashed(each, _SAMPLED) for name, each in named if name not in updated}

    @staticmethod
    def without_training(
        run: RunContext, name: str, function: Compute, calls: dict[Any, Iterator[int]]
    ) -> Compute:
        """Return a function that is rehearsed without training; `calls` counts its calls."""
        of_program = programs_own(function)
        numbers = calls.setdefault(getattr(of_program, "__code__", of_program), itertools.count())
        rehearsals: Rehearsals | None = None

        @wraps(function)
        def call(model: nn.Module, batch: Any) -> Any:
            nonlocal rehearsals
            is_first_with_unlike = rehearsals is None and run.unlike
            if is_due(AT_FIRST, next(numbers)) or is_first_with_unlike:
                rehearsals = rehearsals or Rehearsals(run, {name: function}, model)
                return rehearsals._rehearsed_pass(name, function, batch)
            return function(model, batch)

        return call

    def _rehearsed_pass(self, name: str, function: Compute, batch: Any) -> Any:
        """Rehearse a pass, then compute and return it."""
        if not self.is_exact:
            return function(self._model, batch)
        own = OwnGenerators(model=self._model, **self._functions)
        own.search()
        devices = [part.torch for part in self._run.device.parts]
        drawn = generator_states(devices), own.states()

        def call(given: Any) -> Seen:
            with self._run.device.generators_put_back(), own.put_back():
                set_generator_states(drawn[0], devices)
                own.set_states(drawn[1])
                return hashes_of_leaves(function(self._model, given))

        before, spare = self._account_again(), spare_copy(batch)
        with buffers_put_back(self._model) as restart:
            elsewhere = self._once_elsewhere(name, before, call, restart, spare)
            if not elsewhere:
                self._rehearse(name, call, restart, spare)
        found = function(self._model, batch)
        if elsewhere and difference(elsewhere, hashes_of_leaves(found)):
            with buffers_put_back(self._model) as restart:
                self._rehearse(name, call, restart, spare)  # finds out why
        return found

    def _check_reading(
        self, before: Account, batch: Any, spare: Any, read: Callable[[], Any]
    ) -> None:
        """Raise if passes over `spare` changed something that alters the samples read now."""
        self._check_in_place(batch, spare, read)
        known = hash_of(spare)
        told = hash_of(read())
        if told == known or told != hash_of(read()):
            return
        left = self.account()
        for change in before.changes():
            before.put_back(partial(operator.is_, change.holder))
            is_it = hash_of(read()) == known
            left.put_back()
            if is_it:
                raise changes_samples(change.paths[0])

    def _check_in_place(self, batch: Any, spare: Any, read: Callable[[], Any]) -> None:
        known = hash_of(spare)
        if hash_of(batch) == known:
            return
        told = hash_of(read())
        if told != known and told == hash_of(read()):
            raise changes_batch()

    @property
    def is_exact(self) -> bool:
        """Whether a repeated computation has the same bits."""
        return self._run.options.exact or self._run.device.is_host

    def account(self) -> Account:
        """Return what the program keeps now, besides the model's parameters and buffers."""
        if self._known is not None and not self._known[1].changes():
            self._walk, account = self._known  # a place with a new object would have changed
            return account
        program = self._run.program if self._trains else {}
        roots = {"model": self._model, **self._functions, "": self._run.frame}
        roots |= {name: program[name] for name in ("on_gradients", "hooks") if program.get(name)}
        self._walk = looked_at(self._model, {**roots, **self._reads}, self._run.kept.optimizer)
        for more in (*self._run.takers, *self._inner, SETTINGS_OF_PROCESS):
            self._walk.extend({"": more})
        account = self._account(self._walk)
        if self._run.frame is None:  # a frame's variables depend on the place
            self._known = self._walk, account
        return account

    def _account_again(self) -> Account:
        """Read the same places again, since no code of the program has run."""
        return self.account() if self._walk is None else self._account(self._walk)

    def _account(self, walk: Walk) -> Account:
        """Read what a walk found, except memory of parameters that something views."""
        engine = self._run.engine
        state = [*self._model.parameters(), *self._model.buffers()]
        if engine is not None:
            exchange = engine.exchange
            state += [*exchange.parameters, *exchange.fixed]
            state += [each.there for each in exchange.references.all]
        apart = over_memory_of(state, walk.holders)
        self._last = Account(walk.holders, apart=apart, like=self._last)
        return self._last

    def _refusal(self, finding: Dependence) -> RuntimeError:
        return refusal(finding, trains=self._trains, is_body=not self._functions)


def _compare_gradients(team: Team, gradients: Gradients) -> None:
    """Raise if `on_gradients` leaves different gradients on the workers. Collective."""
    votes = None
    while votes is None:
        votes = team.vote(zlib.crc32(hashed(gradients).encode()), "changed gradients")
    if len(set(votes.values())) > 1:
        raise MismatchError(
            "`on_gradients` must leave the same gradients on every worker, but does not: compute "
            "them from its arguments, not from the rank, the time or what passes store, and draw "
            "with the default generators, which are seeded alike."
        )


def looked_at(model: nn.Module, roots: Mapping[str, Any], optimizer: Optimizer) -> Walk:
    """Walk from a program's objects, but not into the state of the model or an optimizer."""
    modules = [*model.modules(), *optimizers_of(optimizer).values()]
    state = itertools.chain(model.parameters(), model.buffers())
    return Walk(roots, elsewhere=set(map(id, state)), layers=set(map(id, modules)))


@contextmanager
def _other_weights(model: nn.Module) -> Iterator[None]:
    """Replace some parameters within a block, the smallest first, in memory that is not shared."""
    room, before = _OTHERWISE, []
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    for parameter in sorted(trained, key=torch.Tensor.numel):
        room -= parameter.nbytes
        if room < 0:
            break
        before.append((parameter, parameter.data))
    try:
        for parameter, data in before:
            parameter.data = data * 0.5 + 0.25
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
