"""Who takes the steps of the program's own loop? Its frames, whose variables belong to the run.

::

    def watched(run):                          asks for the steps
        yield from run.steps(…)
    for step in watched(run):                  takes them
        …

One frame may do both. Which ones do is known once the first step is taken: only then is it known
where the variables are that a loop leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any, final

from unisono.programs.frames import KeptFrame, frame_of, kept_frame
from unisono.programs.live import (
    begin_of_instruction,
    frames_of_loop,
    goes_elsewhere,
    has_stored,
    is_looped_over,
    iterators_around,
    takers_of,
    takes_in_a_loop,
)
from unisono.programs.raised import raised_in
from unisono.programs.walk import is_of_program
from unisono.training.failures import note_left_by
from unisono.training.growth import report_loop
from unisono.training.loop_plan import LoopPlan
from unisono.training.restored import as_it_was
from unisono.training.run_context import LOOKED_AT_LOOPS, RunContext
from unisono.training.step import AT_FIRST, Step, is_due
from unisono.training.watched_program import watch_program

_UNSEEN = (
    "the code that iterates over the steps may keep state that Unisono cannot see (a "
    "comprehension, `reduce`, a recursive function), which starts over when the run resumes or a "
    "worker is replaced: write `for step in run.steps(…):`, and keep state in variables"
)
_PAST_ITS_END = (
    "`{}` leaves its loop over steps with `return`, or with a `break` that skips an `else` (line "
    "{}), but a resumed run and a worker that joins pass a finished loop as if its steps had run "
    "out: use `break` without `else`, and return after the loop"
)
_ELSEWHERE = (
    "the steps of one loop are taken in two places (line {} and line {}), but a resumed run and a "
    "worker that joins start in the first: take them in one place, or call `run.steps` twice"
)
_COUNTED = (
    "`{}` around the steps starts over when the run resumes or a worker is replaced: derive what "
    "differs from step to step from `step.number`"
)


@final
class StepTakers:
    """The frames of the program that ask for the steps of one loop, and take them.

    Args:
        run: the loop's run.
        asking: the frame that has asked for the steps.
        itself: refers to the generator of the steps if iterators may be around it.
    """

    def __init__(
        self, run: RunContext, asking: FrameType, itself: Sequence[Callable[[], Any]]
    ) -> None:
        self._run, self._itself = run, itself
        self._asking, self._asked_at = kept_frame(asking), asking.f_lasti
        self._frames, self._then = [self._asking], list[KeptFrame]()
        self._num_looks = 0
        self._place, self._line = _place_of(asking), 0  # where the first step is taken
        self._until_taken = ExitStack()
        if not is_looped_over(asking):
            self._until_taken.enter_context(as_it_was(run))

    def find(self, taking: FrameType) -> None:
        """Find all frames, once one takes the first step."""
        run = self._run
        frame = frames_of_loop(taking, frame_of(self._asking))[-1]
        run.frame = kept_frame(frame)
        run.takers = [kept_frame(one) for one in takers_of(frame) if is_of_program(one)]
        self._frames = [*map(kept_frame, frames_of_loop(taking, frame)), *run.takers]

    def watch(self, plan: LoopPlan) -> None:
        """Watch the variables of all frames, and undo what was done after the steps were asked for.

        A loop that continues has the state from after that.
        """
        self._until_taken.close()
        if self._frames != [self._asking] or has_stored(self._asking, self._asked_at):
            watch_program(self._run, plan, self._frames, are_all=True)
        elif self._run.program_kept is not None:
            self._run.program_kept.has_all_frames = True

    def begin(self, taking: FrameType) -> None:
        """Count a loop of the program.

        Of many loops in one place, as in reinforcement learning, the first steps of eight are
        looked at, and those of every eighth after them.
        """
        seen, place = self._run.loops_seen, _place_of(taking)
        seen[place] += 1
        if seen[place] > LOOKED_AT_LOOPS and seen[place] % LOOKED_AT_LOOPS != 0:
            self._num_looks = AT_FIRST

    def looks_at(self, step: int) -> bool:
        """Return whether a shard of a step is to be yielded again."""
        is_looked_at = is_due(self._num_looks, step)
        self._num_looks += is_looked_at
        return is_looked_at

    def check(self, taking: FrameType, step: Step, *, is_first: bool) -> None:
        """Report what the code that has taken a step may keep where Unisono cannot see it."""
        takers, run = [taking, *takers_of(taking)], self._run
        if (kept := [*map(kept_frame, takers)]) != self._then:
            if not (is_first and all(map(takes_in_a_loop, takers))):
                run.say_once(_UNSEEN)
            self._then = kept
        if is_first:
            self._place, self._line = _place_of(taking), taking.f_lineno
        elif self._place != _place_of(taking):
            run.say_once(_ELSEWHERE.format(self._line, taking.f_lineno))
        if is_first:
            report_loop(run, step)
            is_new = run.loops_seen[_place_of(taking)] <= 1
            # This is slow.
            if is_new and self._itself and (around := iterators_around(self._itself[0]())):
                run.say_once(_COUNTED.format(around[0]))

    def note_left(self, taking: FrameType) -> None:
        """Record by which exception the program leaves the loop, if by one."""
        frames = [taking, *takers_of(taking)]
        if (error := raised_in(frames)) is not None:
            note_left_by(self._run.kept.last, self._run.num_loops, error)
        for frame in filter(goes_elsewhere, frames):
            self._run.say_once(_PAST_ITS_END.format(frame.f_code.co_name, frame.f_lineno))


def _place_of(taking: FrameType) -> tuple[CodeType, int]:
    return taking.f_code, begin_of_instruction(taking.f_code, taking.f_lasti)
