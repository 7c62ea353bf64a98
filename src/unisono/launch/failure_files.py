"""How did a job fail? As text and JSON in its run directories, for those who were not there.

    failure.txt    what the user was told, word by word
    failure.json   the same in fields: rank, step, signal, exception, who failed after it

Both are of the newest job in that directory; one that ends well removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.errors import NotPlainFileError
from unisono.launch.policy import JobState, WorkerFailure
from unisono.launch.report import failure_message
from unisono.notices import shown
from unisono.plainfile import open_plain
from unisono.workers.control_block import ControlBlock

TEXT_NAME, JSON_NAME = "failure.txt", "failure.json"
FORMAT = 1
_FIELDS = ("rank", "exit_code", "signal", "error", "waited_for")


def note_end(
    directories: Sequence[Path], state: JobState, control: ControlBlock, say: Callable[[str], None]
) -> None:
    """Write how a job has failed, or remove what an earlier one has left if it ended well.

    Args:
        directories: the job's.
        state: how it ended; nothing changes if it was interrupted.
        control: the control block of its workers.
        say: where words for the user go.
    """
    if state.interrupted_by is not None:
        return
    if state.cause is None:
        remove_failure(directories)
    elif directories:
        facts = failure_facts(state, control.world_size, control.step_under_way)
        write_failure(directories, facts, say)


def failure_facts(
    state: JobState,
    num_workers: int,
    step_of: Callable[[int], int | None],
    *,
    ends_others: bool = True,
) -> dict[str, Any]:
    """Put a failure into fields that JSON can hold.

    Args:
        state: of the job, which has failed.
        num_workers: how many workers it had.
        step_of: tells in which step a rank was when it ended, if in any.
        ends_others: whether the other workers were ended for it.
    """
    cause = state.cause
    assert cause is not None
    step = None if cause.rank is None else step_of(cause.rank)
    return {
        "format": FORMAT,
        "time_unix_s": time.time(),
        "world_size": num_workers,
        **_fields(cause),
        "step": step,
        "traceback": cause.said.traceback,
        "message": failure_message(state, num_workers, ends_others=ends_others),
        "others": [_fields(failure) for failure in state.failures if failure is not cause],
    }


def _fields(failure: WorkerFailure) -> dict[str, Any]:
    return {
        "rank": failure.rank,
        "exit_code": failure.exit_code,
        "signal": _signal_name(failure.exit_code),
        "error": failure.said.summary,
        "waited_for": failure.waited_for,
    }


def _signal_name(exit_code: int) -> str | None:
    with contextlib.suppress(ValueError):
        return signal.Signals(-exit_code).name if exit_code < 0 else None
    return f"signal {-exit_code}"


def write_failure(
    directories: Iterable[Path], facts: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Write a failure into run directories; what cannot be written is said."""
    text = f"{facts['message']}\n"
    for directory in directories:
        try:
            _write(directory / TEXT_NAME, text)
            _write(directory / JSON_NAME, json.dumps(facts, indent=1) + "\n")
        except (OSError, NotPlainFileError) as error:
            say(f"the failure cannot be written to {shown(directory, 1000)}: {error}")


def add_failure(
    directories: Iterable[Path],
    facts: Mapping[str, Any],
    began_unix_s: float,
    say: Callable[[str], None],
) -> None:
    """Write a failure beside those of other processes of a job that nobody else watches.

    Args:
        directories: the job's.
        facts: what :func:`failure_facts` returned.
        began_unix_s: what is older is of an earlier job.
        say: where words for the user go.
    """
    for directory in directories:
        try:
            fd = open_plain(directory / JSON_NAME, os.O_RDWR | os.O_CREAT)
            with os.fdopen(fd, "r+", encoding="utf-8", errors="backslashreplace") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
                both = put_together(_parsed(file.read()), facts, began_unix_s)
                _write(directory / TEXT_NAME, f"{both['message']}\n")
                file.seek(0)
                file.truncate()
                file.write(json.dumps(both, indent=1) + "\n")
        except (OSError, NotPlainFileError) as error:
            say(f"the failure cannot be written to {shown(directory, 1000)}: {error}")


def put_together(
    before: Mapping[str, Any] | None, mine: Mapping[str, Any], began_unix_s: float
) -> dict[str, Any]:
    """Decide which of two failures of a job is the first, and which follows from it.

    Args:
        before: what has been written; None: nothing.
        mine: what is to be.
        began_unix_s: what is older is of an earlier job.
    """
    if before is None or not before.get("time_unix_s", 0.0) >= began_unix_s:
        return dict(mine)
    first, other = before, mine
    if before.get("waited_for") is not None and mine["waited_for"] is None:
        first, other = mine, before
    fields = {name: other[name] for name in _FIELDS if name in other}
    others = [*before.get("others", []), *mine["others"], fields]
    return {**first, "others": others}


def remove_older(directories: Iterable[Path], began_unix_s: float) -> None:
    """Remove what jobs have left that ended before this one began."""
    for directory in directories:
        with contextlib.suppress(OSError):
            before = _parsed((directory / JSON_NAME).read_text(errors="replace"))
            if before is None or before.get("time_unix_s", 0.0) < began_unix_s:
                remove_failure([directory])


def _parsed(text: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        facts = json.loads(text)
        if isinstance(facts, dict) and isinstance(facts.get("time_unix_s"), float):
            return facts
    return None


def remove_failure(directories: Iterable[Path]) -> None:
    """Remove what an earlier job has left; the run has ended well."""
    for directory in directories:
        for name in (TEXT_NAME, JSON_NAME):
            with contextlib.suppress(OSError):
                os.unlink(directory / name)


def _write(path: Path, text: str) -> None:
    fd = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
