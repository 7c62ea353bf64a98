"""Messages about the end of a job or a lost worker: what must hold, what was seen, what to do.

Only the first failure is reported, not its consequences.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping

from unisono.runtime.faults import FAULTS_VARIABLE
from unisono.runtime.launch import recovery
from unisono.runtime.launch.policy import JobState, WorkerFailure
from unisono.runtime.limits import limits_behind, memory_limit
from unisono.runtime.notices import listed

PLACE = "This was in "  # the start of the note that says where an exception was raised
# The exit status of one of several hosts if a restart may help (EX_TEMPFAIL of sysexits.h).
TRY_AGAIN = 75
_FEW_LINES = 480  # characters
_SIGNAL_HINTS = {
    signal.SIGKILL: "most often the system ran out of memory: use a smaller batch or fewer "
    "workers, and look into the system's log",
    signal.SIGSEGV: "a segmentation fault in native code: run it again with "
    "PYTHONFAULTHANDLER=1 to see the line",
    signal.SIGBUS: "memory that could not be provided, most often as /dev/shm is full: give a "
    "container more (`docker run --shm-size`), or use a smaller batch or fewer workers",
    signal.SIGABRT: "a native library gave up: its message should stand above",
}


def exit_status(state: JobState, *, is_one_of_several: bool = False) -> int:
    """Return the exit status of the whole job, as a shell would, or :data:`TRY_AGAIN`."""
    if state.interrupted_by is not None:
        return 128 + state.interrupted_by
    cause = state.cause
    if cause is None:
        return 0
    is_loss = cause.rank is None or cause.exit_code < 0
    is_loss |= cause.said.waited_for is not None or cause.said.is_disconnect
    if is_one_of_several and is_loss:
        return TRY_AGAIN
    if cause.rank is None:
        return 1
    if cause.exit_code < 0:
        return 128 - cause.exit_code
    # A worker that exited with 0 while others waited did not end the job successfully, and a
    # program may exit with any number.
    is_taken = is_one_of_several and cause.exit_code == TRY_AGAIN
    return 1 if is_taken else cause.exit_code or 1


def failure_message(state: JobState, num_workers: int) -> str:
    """Describe what failed first, in one sentence and, if there is one, a traceback."""
    cause = state.cause
    assert cause is not None
    if cause.rank is None:
        return (
            "the process that starts the workers must live as long as they do, but it "
            f"{ending(cause.exit_code)}; all workers ended with it. What it printed before, "
            "if anything, stands above."
            # Without memory, it cannot say so itself.
            + "".join(f" {limit}" for limit in memory_limit() if cause.exit_code != os.EX_OSERR)
        )
    if cause.said.waited_for in state.done:
        return _missed(state, cause.said.waited_for, num_workers, "finished its program")
    if cause.exit_code == 0:
        how = "left with exit status 0 in the middle of its program (by `os._exit`?)"
        return _missed(state, cause.rank, num_workers, how)
    same = [
        other.rank
        for other in state.failures
        if other.rank is not None
        and (other.said.summary, other.exit_code) == (cause.said.summary, cause.exit_code)
    ]
    who = f"worker {cause.rank} of {num_workers}"
    if same := sorted(set(same) - {cause.rank}):
        who += f" (the same on {listed('rank', same)})"
    alone = [failure for failure in state.failures if failure.said.waited_for is None]
    ended = len(alone) + len(state.done) + len(state.quiet)
    others = "; the others were ended" if ended < num_workers else ""
    if not cause.said.traceback:
        note = f" It could not be replaced: {cause.note}." if cause.note else ""
        return f"{who} {cause.how or ending(cause.exit_code)}{others}.{note}"
    if cause.said.summary.startswith("SystemExit"):
        return f"{who} {ending(cause.exit_code)}{others}:\n{cause.said.traceback}"
    in_short = "\n".join((*_in_short(state, cause), *_hints(cause, num_workers)))
    return f"{in_short}\nIt was raised on {who}{others}:\n\n{cause.said.traceback}"


def _in_short(state: JobState, cause: WorkerFailure) -> Iterator[str]:
    """Yield what a traceback ends with, and which workers had finished before."""
    gone = sorted(state.done | state.quiet) if cause.said.is_disconnect else []
    if gone:
        yield (
            f"{listed('Worker', gone, ' and ')} had come to the end of the program by then: every "
            f"worker must make the same calls in the same order."
        )
    summary = cause.said.summary.splitlines() or [""]
    # A message may contain another traceback, for example of a DataLoader's process.
    for line in dict.fromkeys((summary[0], summary[-1])):
        # A line that would fill a terminal is printed in full at the traceback's end.
        yield line if len(line) <= _FEW_LINES else f"{line[:_FEW_LINES]} …"
    last = cause.said.traceback.splitlines()[-3:]
    yield from (line for line in last if line.startswith(PLACE))


_NO_GPU = (
    "this machine has no GPU that torch can use: where the program says `cuda`, write "
    '`"cuda" if torch.cuda.is_available() else "cpu"`, and "gloo" for "nccl".'
)
_HINTS_OF_TORCH = {
    "Torch not compiled with CUDA enabled": _NO_GPU,
    "has no attribute '_cuda_setDevice'": _NO_GPU,
    "Found no NVIDIA driver": _NO_GPU,
    "No CUDA GPUs are available": _NO_GPU,
    "doesn't have NCCL built in": _NO_GPU,
    "only supported with GPUs, no GPUs found": _NO_GPU,
    "Attempting to deserialize object on a CUDA device": _NO_GPU,
}


def _hints(cause: WorkerFailure, num_workers: int) -> Iterator[str]:
    text = f"{cause.said.summary}\n{cause.said.traceback}"
    is_spawned = "torch/multiprocessing/spawn.py" in text and "EADDRINUSE" in text
    if is_spawned and num_workers > 1:
        yield (
            f"each of the {num_workers} workers has started all ranks once more, with `mp.spawn`, "
            f"at the same port: start this program with `python`, or `unisono run -n 1`."
        )
    yield from dict.fromkeys(hint for words, hint in _HINTS_OF_TORCH.items() if words in text)
    yield from limits_behind(cause.said.summary)


def interrupt_message(state: JobState, num_workers: int) -> str:
    """Return one line about an interrupted job."""
    assert state.interrupted_by is not None
    name = signal.Signals(state.interrupted_by).name
    by = "Ctrl-C" if state.interrupted_by == signal.SIGINT else name
    ended = "its worker was" if num_workers == 1 else f"all {num_workers} workers were"
    return f"interrupted by {by}; {ended} ended."


def loss_message(
    rank: int,
    pid: int | None,
    how: str,
    step: int,
    before: recovery.RecoveryState,
    after: recovery.RecoveryState,
) -> str:
    """Describe which worker was lost, how, and which workers continue."""
    if after.first_rank is not None:
        return (
            f"rank {after.first_rank + rank} (pid {pid}) {how} in step {step}; all workers of all "
            f"hosts start again."
        )
    who = f"worker {rank} (pid {pid}) {how}"
    then = "a replacement is starting" if after.replaces else "it is not replaced"
    if before.membership is None or rank not in before.membership.ranks:
        return f"{who} before it had joined the others; {then}."
    if before.loop is not None:
        who += f" in step {step}"
    others = () if after.membership is None else after.membership.ranks
    continues = "continues" if len(others) == 1 else "continue"
    on = f"{listed('worker', others, ' and ')} {continues}" if others else "nobody is left"
    return f"{who}; {on}; {then}."


def spare_message(rank: int, how: str) -> str:
    """Return the message for a replacement that failed before it joined the others."""
    return (
        f"the replacement of worker {rank} must run the program again up to where the others are, "
        f"but failed; the others continue without it:\n\n{how}\n"
    )


def joined_message(pids: Mapping[int, int], state: recovery.RecoveryState) -> str:
    """Return the message for replacements, by rank, that have joined the membership."""
    if state.first_rank is not None:
        who = listed("rank", [state.first_rank + rank for rank in pids], " and ")
        return f"{who} {'has' if len(pids) == 1 else 'have'} started again."
    who = listed("worker", [f"{rank} (pid {pid})" for rank, pid in pids.items()], " and ")
    return f"{who} {'has' if len(pids) == 1 else 'have'} joined."


def _missed(state: JobState, rank: int, num_workers: int, how: str) -> str:
    waiting = [failure for failure in state.failures if failure.said.waited_for == rank]
    ranks = sorted(failure.rank for failure in waiting if failure.rank is not None)
    who = f" while {listed('worker', ranks)} waited for it" if ranks else ""
    where = (
        f" Worker {waiting[0].rank} waited here:\n\n{waiting[0].said.traceback}" if ranks else ""
    )
    return (
        f"worker {rank} of {num_workers} {how}{who}: every worker must come to the end of its "
        f"program and make the same calls in the same order.{where}"
    )


def ending(exit_code: int) -> str:
    """Describe how a process ended."""
    if exit_code >= 0:
        return f"left with exit status {exit_code}"
    try:
        signum = signal.Signals(-exit_code)
    except ValueError:
        return f"was killed by signal {-exit_code}"
    is_planned = signum in (signal.SIGKILL, signal.SIGSEGV) and os.environ.get(FAULTS_VARIABLE)
    hint = f"as {FAULTS_VARIABLE} is set" if is_planned else _SIGNAL_HINTS.get(signum)
    return f"was killed by {signum.name}" + (f" ({hint})" if hint else "")
