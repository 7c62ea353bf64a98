"""How is the end of a job put into words? What must hold, what was seen, what to do.

Only the first failure is told; what followed from it is not.
"""

from __future__ import annotations

import signal

from unisono.launch.policy import Failure, JobState

_SIGNAL_HINTS = {
    signal.SIGKILL: "most often the system ran out of memory: use a smaller batch or fewer "
    "workers, and look into the system's log",
    signal.SIGSEGV: "a segmentation fault in native code: run it again with "
    "PYTHONFAULTHANDLER=1 to see the line",
    signal.SIGBUS: "memory that could not be provided: use a smaller batch or fewer workers",
    signal.SIGABRT: "a native library gave up: its message should stand above",
    signal.SIGILL: "an instruction that this processor does not have: check how torch was built",
    signal.SIGFPE: "an arithmetic error in native code: run it again with PYTHONFAULTHANDLER=1",
    signal.SIGTERM: "somebody asked this worker to end",
}


def exit_status(state: JobState) -> int:
    """Give the status that the whole job ends with, as a shell would."""
    if state.interrupted_by is not None:
        return 128 + state.interrupted_by
    cause = state.cause
    if cause is None:
        return 0
    if cause.rank is None:
        return 1
    if cause.exit_code < 0:
        return 128 - cause.exit_code
    # Who left with 0 while others waited did not end the job well.
    return cause.exit_code or 1


def failure_message(state: JobState, num_workers: int) -> str:
    """Tell what failed first, in one sentence and, where there is one, a traceback."""
    cause = state.cause
    assert cause is not None
    if cause.rank is None:
        return (
            "the process that starts the workers must live as long as they do, but it "
            f"{_ending(cause.exit_code)}; all workers ended with it. What it printed before, "
            "if anything, stands above."
        )
    if cause.waited_for in state.done:
        return _missed(state, cause.waited_for, num_workers, "finished its program")
    if cause.exit_code == 0:
        how = "left with exit status 0 in the middle of its program (by `os._exit`?)"
        return _missed(state, cause.rank, num_workers, how)
    same = _same_on(state, cause)
    alone = [failure for failure in state.failures if not failure.is_consequence]
    ended = len(alone) + len(state.done) + len(state.quiet)
    others = "" if ended == num_workers else "; the others were ended"
    who = f"worker {cause.rank} of {num_workers}"
    if not cause.traceback:
        return f"{who} {_ending(cause.exit_code)}{same}{others}."
    if cause.summary.startswith("SystemExit"):
        return f"{who} {_ending(cause.exit_code)}{same}{others}:\n{cause.traceback}"
    return f"{who} raised an exception{same}{others}:\n\n{cause.traceback}"


def interrupt_message(state: JobState, num_workers: int) -> str:
    """Tell in one line that the job ended because somebody wanted it."""
    assert state.interrupted_by is not None
    by = {signal.SIGINT: "by Ctrl-C", signal.SIGTERM: "by SIGTERM"}[
        signal.Signals(state.interrupted_by)
    ]
    ended = "its worker was" if num_workers == 1 else f"all {num_workers} workers were"
    return f"interrupted {by}; {ended} ended."


def _missed(state: JobState, rank: int, num_workers: int, how: str) -> str:
    """Tell who went, who waited, and where the first of those did."""
    waiting = [failure for failure in state.failures if failure.waited_for == rank]
    ranks = sorted(failure.rank for failure in waiting if failure.rank is not None)
    word = "worker" if len(ranks) == 1 else "workers"
    who = f" while {word} {', '.join(map(str, ranks))} waited for it" if ranks else ""
    where = f" Worker {waiting[0].rank} waited here:\n\n{waiting[0].traceback}" if ranks else ""
    return (
        f"worker {rank} of {num_workers} {how}{who}: every worker must come to the end of its "
        f"program and make the same calls in the same order.{where}"
    )


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"left with exit status {exit_code}"
    try:
        signum = signal.Signals(-exit_code)
    except ValueError:
        return f"was killed by signal {-exit_code}"
    hint = _SIGNAL_HINTS.get(signum)
    return f"was killed by {signum.name}" + (f" ({hint})" if hint else "")


def _same_on(state: JobState, cause: Failure) -> str:
    """Name the other workers that said the same; empty when there are none."""
    ranks = sorted(
        failure.rank
        for failure in state.failures
        if failure is not cause
        and failure.rank is not None
        and (failure.summary, failure.exit_code) == (cause.summary, cause.exit_code)
    )
    if not ranks:
        return ""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f" (the same on {word} {', '.join(map(str, ranks))})"
