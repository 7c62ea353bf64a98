"""Programs one after another in the same workers: each exchange at the price of a single start.

For programs that work everywhere; they train for two epochs, and nobody is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.exchanges import device_of, variables_of
from tests.programs import watching
from tests.programs.matrix import Program, programs
from tests.programs.ways import script_of

import unisono

ALL = [one for one in programs() if one.runs_everywhere and one.expected.startswith("SAME")]
_ROWS = {"what_is_changed_between_steps", "slow_copies_of_a_net"}
CHANGED = [one for one in ALL if one.row in _ROWS]  # of those, what changes parameters


def results(chosen: Sequence[Program], exchange: str, workers: int) -> list[list[Any]]:
    """Run programs in new workers; returns what came of each on each worker."""
    given = {**variables_of(exchange), "PROGRAM_DEVICE": device_of(exchange)}
    bodies = [one.body for one in chosen]
    with tempfile.TemporaryDirectory() as folder:
        return unisono.launch(run_all, bodies, folder, given, workers=workers, restarts=0)


def run_all(bodies: Sequence[str], folder: str, variables: dict[str, str]) -> list[Any]:
    """Run programs in this process, which a test has started for that."""
    os.environ.update(variables, PROGRAM_EPOCHS="2")
    found = []
    for number, body in enumerate(bodies):
        watching.noted.clear()
        (here := Path(folder, str(number))).mkdir(exist_ok=True)
        code = compile(script_of(body), "program.py", "exec")
        with contextlib.chdir(here), contextlib.suppress(Exception):
            exec(code, {"__name__": "__main__"})
        said = json.loads(watching.noted[-1])
        found.append({name: said[name] for name in ("error", "digests", "result") if name in said})
    return found
