"""One loop over steps, from sharing the model between workers until each has its own again.

::

    begin       the workers share the model; take the first snapshot, or join the others
    ┌► over?    save what the loop has led to, and end
    │  epoch    check that all workers take its samples in the same order
    │  boundary carry out the leader's plan: a snapshot, a checkpoint, a stop    (boundary.py)
    │  step     the program's `with step:` block: shards, sum, update            (step.py)
    └─ lost?    return to the newest snapshot
    end         each worker's model is its own again
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import Any

from torch import nn

from unisono.data.data_reading import length_of
from unisono.data.fetch import Fetch, Reader
from unisono.data.loader import Loader
from unisono.engine.exchange.choice import EXCHANGE_VARIABLE, chosen, divides_state
from unisono.engine.exchange.exchange import Exchange
from unisono.engine.state.contents import check_contents
from unisono.engine.state.optimizers import kind_of, optimizers_of
from unisono.engine.step.closure_engine import ClosureEngine
from unisono.engine.step.combined_buffers import ways_of
from unisono.engine.step.engine import StepEngine
from unisono.engine.step.records import PhaseTimers
from unisono.programs.forked import ForkedCopy
from unisono.programs.frames import kept_frame
from unisono.programs.generators import OwnGenerators
from unisono.programs.live import is_looped_over
from unisono.runtime.device import num_threads
from unisono.runtime.forbidden import collectives_watched
from unisono.runtime.training_progress import now
from unisono.runtime.workers.context import context
from unisono.runtime.workers.interrupts import interrupts
from unisono.runtime.workers.launcher_messages import Live, Passed
from unisono.runtime.workers.memory import keep_freed_memory
from unisono.runtime.workers.supervisor import is_worker
from unisono.runtime.world import threads_per_worker
from unisono.training.boundary import Boundary
from unisono.training.computing import deterministic_kernels, every_shape_compiled
from unisono.training.course import COURSE, note_course
from unisono.training.failures import forget_left_by, raise_as_left
from unisono.training.first_steps import single_samples_refused
from unisono.training.loop_plan import LoopPlan
from unisono.training.model_placement import check_split_before, place_on
from unisono.training.open_loop import OpenLoop
from unisono.training.out_of_memory import memory_explained
from unisono.training.rehearsals import Rehearsals
from unisono.training.run_context import Observer, RunContext
from unisono.training.sample_planning import no_epochs
from unisono.training.sampler_order import begin_epoch, check_order
from unisono.training.start import report_over, start
from unisono.training.step import AT_FIRST, Step
from unisono.training.step_takers import StepTakers
from unisono.training.step_variants import AlternatingStep, ClosureStep
from unisono.training.watched_program import watch_program

_ANOTHER_LENGTH = (
    "the dataset had {:,} samples when the loop began and no longer has as many, but a loop keeps "
    "the number that it began with: train each size in a `fit` or loop of its own"
)
_OUT_OF_ORDER = (
    "the steps of a loop must be taken before the run begins another loop, but another one has "
    "begun: call `run.steps` where its steps are taken, `for step in run.steps(…):`"
)


def begin_loop(
    run: RunContext,
    plan: LoopPlan,
    observer: Observer | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    functions: Sequence[Any] = (),
    frame: FrameType | None = None,
) -> Generator[Step, None, None]:
    """Begin a loop; see :meth:`unisono.Run.steps`.

    A trainer passes the program's `functions`, and the `loss` if it is computed per shard; a custom
    loop runs in a `frame`.
    """
    if (error := context().unsaved) is not None:
        raise error
    every = None if run.checkpoints is None else run.checkpoints.every
    if plan.samples.is_endless and every is not None and every.epochs is not None:
        raise no_epochs("checkpoint")
    run.loss, run.functions = loss, functions
    run.frame = None if frame is None else kept_frame(frame)
    run.observer = Observer() if observer is None else observer
    watch_program(run, plan, [] if run.frame is None else [run.frame], are_all=frame is None)
    model, optimizer, device = run.kept.model, run.kept.optimizer, run.device
    check_split_before(model, device)
    if not device.is_host:
        # The program may have moved the model since then, or added layers and groups.
        check_contents(model, optimizer, device)
        place_on(model, optimizer, device)
    names = ("loss", "embed") if len(run.functions) == 2 else ()
    rehearsals = Rehearsals(run, dict(zip(names, run.functions, strict=False)))
    note_course(run, sys._getframe(1))
    # Without functions, a loop's values are compared in its steps.
    start(run, plan, rehearsals.places if run.functions else None)
    if not run.is_ahead:
        run.kept.last[COURSE] = run.course
    itself: list[Callable[[], Any]] = []
    takers = None if frame is None else StepTakers(run, frame, itself)
    steps = steps_of(run, plan, plan.fetch(), takers, run.num_loops)
    if frame is None or not is_looped_over(frame):
        itself.append(weakref.ref(steps))
        context().note_loop(steps)
    return steps


def steps_of(
    run: RunContext, plan: LoopPlan, fetch: Fetch, takers: StepTakers | None, number: int
) -> Generator[Step, None, None]:
    """Yield the steps of one loop. Collective: every rank uses every step, in the same order.

    `takers` looks at the program's frames, if the loop is its own; `number` is the loop's.
    """
    if takers is not None:
        takers.find(sys._getframe(1))
    if run.is_over(plan.totals):
        _pass_over(run, plan, takers, number)
        return
    if run.num_loops != number:
        raise RuntimeError(_OUT_OF_ORDER)
    if run.engine is not None:
        raise RuntimeError("a run must finish one loop over `steps` before it begins another.")
    if takers is not None:
        takers.watch(plan)
    entry = run.replicated_calls.enter_loop()
    if isinstance(entry, Passed):
        run.kept.apply_ended(entry, run.team)
        run.goes_on &= not run.is_stopped  # it was called before `stop`
        raise_as_left(run.kept.last, number)
        return
    run.has_joined = entry is not None and entry.loop is not None
    forget_left_by(run.kept.last, number)
    with (
        _under_way(run, plan, entry) as boundary,
        _loader(run, plan, fetch) as loader,
        single_samples_refused(run.kept.model, plan, run.kept.position),
        OpenLoop(
            recovers=run.team.supervisor.can_replace, has_directory=run.checkpoints is not None
        ) as opened,
    ):
        # A worker that joins a running loop comes after what the others have agreed on.
        is_agreed = run.has_joined
        check_order(run, plan.samples)
        make_step: Callable[..., Step] = ClosureStep if run.takes_closure else Step
        if len(boundary.engine.optimizers) > 1:
            make_step = AlternatingStep
        rehearsals = Rehearsals(run, {}, reads=plan.program)
        num_steps, length = 0, length_of(plan.reading.dataset)
        run.observer.begin()
        if takers is not None:  # otherwise the observer calls has_begun
            takers.begin(sys._getframe(1))
            run.has_begun()
        while True:
            is_over = run.is_over(plan.totals)
            if is_over and boundary.admits:  # in loops of one step they could never join
                boundary.act()
                continue
            if is_over and boundary.end():
                return
            if not is_over:
                if run.kept.position.batch == 0:
                    if length_of(plan.reading.dataset) != length:
                        run.say_once(_ANOTHER_LENGTH.format(length))
                    begin_epoch(run, plan.samples, is_agreed=is_agreed)
                loader.begin_epoch(run.kept.position.epoch, None if is_agreed else run.team)
            is_agreed = False
            if not boundary.act() or run.is_over(plan.totals):
                continue
            samples = plan.samples.at(run.kept.position.epoch)
            boundary.steps_per_epoch = samples.steps_per_epoch
            step = make_step(boundary, samples, loader, run.kept.position)
            # A trainer rehearses shards; in a custom loop one shard is yielded again.
            if takers is not None and plan.samples.shards > 1 and takers.looks_at(step.number):
                step.rehearse = rehearsals.of_body
            try:
                yield step
            except GeneratorExit:
                if takers is not None:
                    takers.note_left(sys._getframe(1))
                raise
            num_steps += 1
            if takers is not None:
                takers.check(sys._getframe(1), step, is_first=num_steps == 1)
            if num_steps == AT_FIRST and is_worker():
                keep_freed_memory()
            opened.check_is_inmost()
            step.check_finished()
            if not step.is_done:
                boundary.undo_body()


def _pass_over(run: RunContext, plan: LoopPlan, takers: StepTakers | None, number: int) -> None:
    """Do what follows a loop that has nothing left to do, such as one that an earlier start did."""
    report_over(run, plan.totals)
    if run.is_stopped:
        plan.totals.note_left(run.kept.last, run.num_loops)
    if run.checkpoints is not None and not (run.is_ahead or run.has_ended):
        run.checkpoints.mark_idle(run.loop)
    program = run.program_kept
    if takers is not None and program is not None and program.is_continued(number):
        takers.watch(plan)
        run.has_begun()
    if run.is_ahead or plan.totals.were_left(run.kept.last, number):
        raise_as_left(run.kept.last, number)


def _loader(run: RunContext, plan: LoopPlan, fetch: Fetch) -> Loader:
    """Return the loader; with loader processes, it checks what the program changes."""
    look = None
    if plan.reading.loader_workers:
        state = (*run.kept.model.parameters(), *run.kept.model.buffers())
        look = partial(ForkedCopy, plan.program, set(map(id, state)))
    if isinstance(fetch, Reader):
        fetch.tell = run.say_once
    return plan.loader(fetch, run.kept.position, run.device, look=look, tell=run.say_once)


@contextmanager
def _under_way(run: RunContext, plan: LoopPlan, live: Live | None) -> Iterator[Boundary]:
    """Share the model; restore generators and threads after it. None `live`: begin. Collective."""
    kept = run.kept
    boundary: Boundary | None = None
    try:
        with ExitStack() as stack:
            stack.enter_context(run.device.generators_put_back())
            stack.enter_context(now().put_back())
            stack.enter_context(num_threads(threads_per_worker()))
            stack.enter_context(deterministic_kernels(run.is_deterministic))
            stack.enter_context(every_shape_compiled())
            stack.enter_context(collectives_watched())
            boundary = _entered(run, plan, live, PhaseTimers(), stack)
            try:
                yield boundary
            except GeneratorExit:
                _leave(run, boundary)
                raise
    finally:
        run.engine = run.frame = None
        run.takers = ()
        if boundary is not None and not plan.totals.are_reached(kept.position):
            plan.totals.note_left(kept.last, run.num_loops)
        end = json.dumps(
            {
                "position": asdict(kept.position),
                "last": kept.last,
                "snapshot": 0 if run.memory is None else run.memory.snapshots.number,
                "was_left": boundary is not None and boundary.was_left,
            }
        ).encode()
        has_ended = boundary is not None and boundary.has_ended
        run.replicated_calls.leave_loop(end if has_ended else None)


def _leave(run: RunContext, boundary: Boundary) -> None:
    """Save the result of a loop that the program leaves.

    Python discards what is raised here, as the generator of the steps may be closed anywhere: the
    error is raised when the next loop begins, or once the program has ended.
    """
    try:
        boundary.leave()
    except Exception as error:
        context().unsaved = error
        step = run.kept.position.step
        run.say(f"the result of the loop that was left at step {step} is not saved: {error}")


def _entered(
    run: RunContext, plan: LoopPlan, live: Live | None, timers: PhaseTimers, stack: ExitStack
) -> Boundary:
    """Bind the model, and join the others or begin. Collective."""
    own = OwnGenerators(**run.program, **plan.program)
    own.search()
    stack.enter_context(own.put_back())
    with memory_explained(run, "start of the loop"):
        run.engine = engine = _engine(run, plan, live, timers, own)
    stack.callback(engine.exchange.unbind)
    if run.checkpoints is not None and run.team.supervisor.hears_signals:
        checkpoints = run.checkpoints
        stack.enter_context(interrupts().in_loop(run.team, run.say, lambda: checkpoints.newest))
    boundary = Boundary(run, engine, plan.samples)
    if run.has_joined:
        boundary.undo()
        run.team.faults.meet("join", run.kept.position.step)
    else:
        _begin(run, boundary)
    return boundary


def _engine(
    run: RunContext, plan: LoopPlan, live: Live | None, timers: PhaseTimers, own: OwnGenerators
) -> StepEngine:
    """Return the engine, with the model bound to what carries gradients."""
    model, optimizer = run.kept.model, run.kept.optimizer
    if run.replicated_calls.is_loop_kept:
        run.memory = None  # kept: a replacement needs what each loop ended with
    kind = chosen(run.exchange, optimizer)
    if divides_state(run.exchange) and not kind.ownership.is_in_pieces:
        run.say_once(
            f"each worker keeps the whole optimizer state, despite "
            f"{EXCHANGE_VARIABLE}={run.exchange}: {kind_of(optimizer)} needs whole parameters, or "
            f"has hooks."
        )
    exchange = Exchange(
        kind,
        model,
        optimizer,
        shards=plan.samples.shards,
        team=run.team,
        device=run.device,
        new_key=run.replicated_calls.new_key(),
        previous=run.memory,
        live=live,
    )
    run.memory = exchange.memory
    options: dict[str, Any] = {
        "seed": plan.samples.seed,
        "team": run.team,
        "clipping": {name: run.options.clipping_of(name) for name in optimizers_of(optimizer)},
        "scaling": run.scaling,
        "timers": timers,
        "on_gradients": run.options.on_gradients,
        "own": own,
        "buffers": ways_of(model, run.options.buffers),
        "watches_program": run.observer.runs_program_code,
        "are_alike": not run.are_mixed,
    }
    engine = ClosureEngine if run.takes_closure else StepEngine
    return engine(model, optimizer, exchange, **options)


def _begin(run: RunContext, boundary: Boundary) -> None:
    """Take the first snapshot, unless it cannot be restored."""
    program = run.program_kept
    if run.kept.has_lost_schedule([] if program is None else program.things):
        trouble = (
            "a learning rate schedule steps with the optimizer, but is not saved with the run: "
            'write `run.state["schedule"] = schedule` before the loop'
        )
        boundary.forgo_recovery(trouble)
        if run.checkpoints is not None:
            run.say(f"{trouble}; otherwise a resumed run has different learning rates.")
    boundary.begin()
