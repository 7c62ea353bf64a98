"""How did a run fail that nobody, or another launcher, has started? Its processes write it down.

Our launcher writes `failure.txt` and `failure.json` for its workers. Elsewhere each process that
ends with an exception adds itself in the run's directory: the first is the failure, unless it only
says that another worker is gone. A process that is killed can write nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path
from types import TracebackType

from unisono.launch.exceptions import is_disconnect, lost_peer, summary_line, traceback_text
from unisono.launch.failure_files import add_failure, failure_facts, remove_older
from unisono.launch.policy import WorkerFailure, failed, start
from unisono.notices import say
from unisono.per_process import per_process
from unisono.workers.context import context
from unisono.workers.launcher_messages import ProgramFailed
from unisono.workers.team import Team


def failure_notes() -> FailureNotes | None:
    """Give this process's notes, always the same; None where our launcher takes them."""
    return per_process(FailureNotes) if context().launcher is None else None


class FailureNotes:
    """Writes down how this process fails, in the directories of its runs. Final.

    See :func:`failure_notes`.
    """

    def __init__(self) -> None:
        self._began_unix_s = time.time()
        self._pid = os.getpid()
        self._team: Team | None = None
        self._directories: dict[Path, None] = {}
        self._is_in_loop = False
        self._has_failed = False
        self._call_before = sys.excepthook
        sys.excepthook = self._note
        atexit.register(self._leave)

    def begin(self, directory: Path, team: Team) -> None:
        """Note that a loop begins which keeps checkpoints in a directory."""
        self._team, self._is_in_loop = team, True
        self._directories[directory] = None

    def end(self) -> None:
        """Note that it has come to its end."""
        self._is_in_loop = False

    def _note(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            if os.getpid() == self._pid and self._team is not None:
                self._has_failed = True
                if isinstance(error, Exception):  # else it was interrupted
                    self._write(error, self._team)
        finally:
            self._call_before(kind, error, traceback)

    def _write(self, error: Exception, team: Team) -> None:
        rank = team.world.rank
        said = ProgramFailed(
            1,
            summary_line(error),
            traceback_text(error),
            lost_peer(error),
            is_disconnect(error),
            b"",
        )
        state = failed(start(team.world.world_size), WorkerFailure(rank, 1, said), 0.0).state
        facts = failure_facts(
            state, team.world.world_size, team.supervisor.control.step_under_way, ends_others=False
        )
        add_failure(self._directories, facts, self._began_unix_s, say)

    def _leave(self) -> None:
        """Remove what an earlier job has left, as the launcher does, if this one has ended well."""
        is_first = self._team is not None and self._team.position == 0
        has_ended = not self._is_in_loop and not self._has_failed
        if os.getpid() == self._pid and is_first and has_ended:
            remove_older(self._directories, self._began_unix_s)
