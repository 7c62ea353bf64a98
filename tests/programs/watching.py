"""Looking at a program from outside of it: where it stands, and whom it waits for.

The place is that of the faults (`unisono.runtime.faults`), which every step passes, whoever wrote
its loop: nothing is added to the program itself.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.replacements import COMES_WITHIN_S, wait_for_replacement

from unisono.runtime.faults import Faults
from unisono.runtime.workers.context import context

BEGAN_S = time.process_time()
noted: list[str] = []  # by the programs of this process
STOP = "stop-now"  # a file: the program has come to the step in which it is to be stopped


def begin() -> None:
    """Look at every step of this process, if a test has started it."""
    if "PROGRAM_FOLDER" not in os.environ:
        return
    folder, meet, make = Path(os.environ["PROGRAM_FOLDER"]), Faults.meet, Faults.__init__
    stops_at = int(os.environ.get("PROGRAM_STOPS", -1))

    def planned(faults: Faults, *args: Any) -> None:
        make(faults, *args)
        faults.are_planned = True

    def watched(faults: Faults, at: str, step: int | None = None) -> None:
        if at == "begin":
            _begins(folder, step or 0, stops_at)
        meet(faults, at, step)

    Faults.__init__, Faults.meet = planned, watched  # type: ignore[method-assign]


def _begins(folder: Path, step: int, stops_at: int) -> None:
    team = context().team()
    if team.is_replacement:
        _file("joined", str(step))
    if step == stops_at:
        _stop(folder, team)
    if not any(folder.glob("found-*")):  # else the replacement has come to its end already
        wait_for_replacement(_Waiting(team, folder))


@dataclass(frozen=True)
class _Waiting:
    """A team that a replacement may come to, as long as none has failed."""

    team: Any
    folder: Path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.team, name)

    @property
    def is_stop_requested(self) -> bool:
        return self.team.is_stop_requested or any(self.folder.glob("found-*"))


def _stop(folder: Path, team: Any) -> None:
    """Have whoever started this process send its signal, and wait until it has come."""
    if dataclasses.astuple(team.world)[1] == 1:  # not as the program would read it
        os.kill(os.getpid(), int(os.environ["PROGRAM_STOPPED_BY"]))
        return
    (folder / STOP).touch()
    end_s = time.monotonic() + COMES_WITHIN_S
    while not team.is_stop_requested and time.monotonic() < end_s:
        time.sleep(0.001)


def note(said: str) -> None:
    """Leave what a program has come to."""
    noted.append(said)
    if "PROGRAM_FOLDER" in os.environ:
        _file("found", said)


def _file(kind: str, said: str) -> None:
    rank = os.environ.get("RANK", "0")
    Path(os.environ["PROGRAM_FOLDER"], f"{kind}-{rank}").write_text(said)
