"""Where is a worker now? Each keeps it in a file of its own, which others read, also afterwards.

A worker writes at the places that the table of faults knows; what lies between two of them is named
after what happens there. A process that has no file is still starting.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

_PLACE = struct.Struct("<24sqq")  # phase, step, notes so far
STARTING = "starting"

# after the place ... comes ...
AFTER = {
    "begin": "fetching",
    "shard": "fetching",
    "gradients": "waiting",
    "sums": "adding up",
    "update": "updating",
    "updated": "waiting again",
    "commit": "between steps",
    "snapshot": "snapshot",
    "join": "joining",
}


class Recorder:
    """Stands in for a worker's faults and writes down where they could happen. Final."""

    are_planned = True

    def __init__(self, faults: Any, path: Path | None) -> None:
        self._faults = faults
        self._file: mmap.mmap | None = None
        if path is not None:
            beside = path.with_suffix(".new")
            beside.write_bytes(_PLACE.pack(b"loading", -1, 0))
            with open(beside, "r+b") as file:
                self._file = mmap.mmap(file.fileno(), _PLACE.size)
            os.rename(beside, path)

    @classmethod
    def attach(cls, run: Any, folder: str) -> Recorder:
        """Put one in the place of the faults of a run's team."""
        team = run.team if hasattr(run, "team") else run._context.team  # of an older version
        recorder = cls(team.faults, Path(folder, str(os.getpid())) if folder else None)
        team.faults = recorder
        return recorder

    def meet(self, at: str, step: int | None = None) -> None:
        self.note(AFTER[at], step)
        self._faults.meet(at, step)

    def flips(self, step: int) -> str:
        return ""  # a fault of the tag `wide`

    def note(self, phase: str, step: int | None = None) -> None:
        if self._file is not None:
            # In the file alone: numbers that are kept here would belong to the program's state.
            _, known, num_notes = _PLACE.unpack_from(self._file)
            number = known if step is None else step
            _PLACE.pack_into(self._file, 0, phase.encode(), number, num_notes + 1)


def read_phase(folder: Path, pid: int) -> tuple[str, int]:
    """Tell the phase and the step of a worker, dead or alive."""
    try:
        data = (folder / str(pid)).read_bytes()
    except FileNotFoundError:
        return STARTING, -1
    phase, step, _ = _PLACE.unpack(data)
    return phase.rstrip(b"\0").decode(), step
