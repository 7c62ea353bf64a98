"""What follows when a worker ends or fails, or on an interrupt? Pure: (state, event) → decision.

Each event is a function, which ``supervise`` calls. `now` is the time of a monotonic clock, in s.

A job ends in stages, each with a deadline after which the next begins::

    RUNNING ──a failure──► GRACE ──0.3 s──► TERMINATE ──0.4 s──► KILL ──0.4 s──► ABANDON
       └──────an interrupt─────────────────────┘

After a gentle interrupt the job first finishes its step; then :func:`end_now` ends it.

Invariant: stages never go backwards, and the job is over as soon as every worker has exited.
"""

from __future__ import annotations

import enum
import math
import signal
from dataclasses import dataclass, replace

from unisono.runtime.launch.recovery import MarkDeparture
from unisono.runtime.workers.launcher_messages import ProgramFailed
from unisono.runtime.workers.meeting_point import Departure


class Stage(enum.IntEnum):
    """The stages in which a job ends."""

    RUNNING = 0
    GRACE = 1
    TERMINATE = 2
    KILL = 3
    ABANDON = 4


_NOTHING = ProgramFailed(0, "", "", None, False, b"")
SECONDS_IN_STAGE = {Stage.GRACE: 0.3, Stage.TERMINATE: 0.4, Stage.KILL: 0.4}


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Why a worker did not finish."""

    rank: int | None  # the worker; None if the fork server or the store was lost
    exit_code: int  # its exit status; negative for a signal
    said: ProgramFailed = _NOTHING  # what the worker reported about it
    note: str = ""  # why the others could not continue without the worker
    how: str = ""  # how it ended, if more is known than the status
    is_late: bool = False  # it was reported once the workers were being ended


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send a signal to these workers."""

    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True, slots=True)
class KillServer:
    """Kill the fork server; its workers die with it."""


Action = MarkDeparture | SendSignal | KillServer


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job."""

    alive: frozenset[int]  # workers whose process may still run
    done: frozenset[int] = frozenset()  # workers whose program ended well
    # workers that exited with 0 before their program's end: a failure only if others wait for them
    quiet: frozenset[int] = frozenset()
    failures: tuple[WorkerFailure, ...] = ()  # in the order in which they became known
    needs_result: bool = False  # a worker that exits without reporting "done" has failed
    stage: Stage = Stage.RUNNING  # the current stage
    due_s: float = math.inf  # when the stage ends, as a value of `now`
    interrupted_by: int | None = None  # the signal that requested the end of the job

    @property
    def over(self) -> bool:
        """Whether nothing can happen any more."""
        return not self.alive or self.stage is Stage.ABANDON

    @property
    def cause(self) -> WorkerFailure | None:
        """The failure to show: the first that is not a consequence of another, else the first.

        A lost connection is a consequence of another failure if there is one: the kernel closes the
        connections of a killed process before its end is reported.
        """
        own = [failure for failure in self.failures if failure.said.waited_for is None]
        for failure in [*(one for one in own if not one.said.is_disconnect), *own]:
            return failure
        return self.failures[0] if self.failures else None

    @property
    def failed_by_itself(self) -> bool:
        """Whether the cause is an exception of a worker, also if a signal was to end the job."""
        cause = self.cause
        if cause is None or cause.is_late or not cause.said.traceback:
            return False
        return cause.said.waited_for is None and not cause.said.is_disconnect

    def has_failed(self, rank: int | None) -> bool:
        """Return whether a failure of this worker is known."""
        return any(failure.rank == rank for failure in self.failures)


@dataclass(frozen=True, slots=True)
class Decision:
    """The new state, and what to do now."""

    state: JobState
    actions: tuple[Action, ...] = ()


def failed(state: JobState, failure: WorkerFailure, now: float) -> Decision:
    """Handle a failure that a worker reports before it exits, or an exit without a report."""
    if failure.rank is None or state.has_failed(failure.rank):
        return Decision(state)
    # If it exited quietly before, the failed worker misses it now.
    missed = failure.said.waited_for
    before = (WorkerFailure(missed, 0),) if missed in state.quiet else ()
    known = replace(failure, is_late=state.stage >= Stage.TERMINATE)
    failures = (*state.failures, *before, known)
    state = replace(state, quiet=state.quiet - {missed}, failures=failures)
    if state.stage is Stage.RUNNING:
        # The first failure; the others may report what they know, then end.
        state = replace(state, stage=Stage.GRACE, due_s=now + SECONDS_IN_STAGE[Stage.GRACE])
    return Decision(state, (MarkDeparture(failure.rank, Departure.FAILED),))


def done(state: JobState, rank: int) -> Decision:
    """Handle a worker's report that its program has finished, before it exits."""
    state = replace(state, done=state.done | {rank})
    return Decision(state, (MarkDeparture(rank, Departure.FINISHED),))


def may_survive(state: JobState, rank: int, exit_code: int) -> bool:
    """Return whether others may continue after this exit: a kill from outside while it worked."""
    return (
        exit_code < 0
        and state.stage is Stage.RUNNING
        and rank not in state.done
        and not state.has_failed(rank)
    )


def exited(
    state: JobState, rank: int, exit_code: int, now: float, *, note: str = "", how: str = ""
) -> Decision:
    """Handle the exit of a worker; `note` and `how` as in :class:`WorkerFailure`."""
    state = replace(state, alive=state.alive - {rank})
    # Libraries may abort while they unload (gloo: SIGABRT); all work was done by then.
    if rank in state.done or state.has_failed(rank):
        return Decision(state)
    leave = MarkDeparture(rank, Departure.FAILED)
    if state.stage >= Stage.TERMINATE:
        return Decision(state, (leave,))
    if exit_code == 0 and not state.needs_result:
        return Decision(replace(state, quiet=state.quiet | {rank}), (leave,))
    return failed(state, WorkerFailure(rank, exit_code, note=note, how=how), now)


def left_behind(state: JobState, rank: int) -> Decision:
    """Handle the exit of a worker that is not replaced, while the others continue."""
    return Decision(replace(state, alive=state.alive - {rank}))


def server_lost(state: JobState, exit_code: int) -> Decision:
    """Handle the loss of the fork server, and of its workers with it."""
    lost = state.alive
    state = replace(state, alive=frozenset())
    if not lost - state.done or state.stage >= Stage.TERMINATE:
        return Decision(state)
    state = replace(state, failures=(*state.failures, WorkerFailure(None, exit_code)))
    leaves = tuple(MarkDeparture(rank, Departure.FAILED) for rank in sorted(lost - state.done))
    return Decision(state, leaves)


def interrupted(state: JobState, signum: int, now: float, *, gently: bool = False) -> Decision:
    """Handle a request to end the job; `gently`: after the current step."""
    if state.interrupted_by is not None:
        state = replace(state, stage=Stage.ABANDON, due_s=math.inf)
        return Decision(state, (KillServer(),))
    state = replace(state, interrupted_by=signum)
    if gently and state.stage is Stage.RUNNING:
        return Decision(state)
    return end_now(state, now)


def end_now(state: JobState, now: float) -> Decision:
    """End the job once everything that had to precede its end is done."""
    if state.stage >= Stage.TERMINATE:
        return Decision(state)
    return _enter(state, Stage.TERMINATE, now)


def time_passed(state: JobState, now: float) -> Decision:
    """Enter the next stage if the current one has lasted long enough."""
    return Decision(state) if now < state.due_s else _enter(state, Stage(state.stage + 1), now)


def _enter(state: JobState, stage: Stage, now: float) -> Decision:
    state = replace(state, stage=stage, due_s=now + SECONDS_IN_STAGE.get(stage, math.inf))
    if stage is Stage.ABANDON:
        return Decision(state, (KillServer(),))
    signum = signal.SIGTERM if stage is Stage.TERMINATE else signal.SIGKILL
    return Decision(state, (SendSignal(tuple(sorted(state.alive)), signum),))
