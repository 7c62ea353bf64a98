"""The ways in which a program is run, and what came of each.

::

    alone             plain Python
    two, three        workers
    kill0, kill1      a worker is killed at the beginning of a step, or in one; steps wait for its
                      replacement, and those after it are computed with it
    back              a worker is killed in an update, so that the run goes back
    stop12, stop31    stopped by SIGTERM, and started again with other workers
    crash12, crash31  so, but by SIGKILL, and without a last checkpoint
    loaders …         with two loader processes for each worker

and for programs that are run everywhere::

    four              workers
    staged, gloo, …   exchanges (`tests.chaos.exchanges`), sim on the test accelerator
    commit            a leader is killed before the last snapshot
    killstaged, …     kills and stops on them
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.exchanges import device_of, has_accelerator, variables_of
from tests.programs.watching import STOP
from tests.warm import processes

TIMEOUT_S = 120.0
KILLED = 14  # of 24 steps, where the programs' epochs have 6
_PEERS = ("PeerLostError",)  # what others say of whoever was refused


@dataclass(frozen=True)
class Start:
    """One start of a program; no workers are plain Python."""

    workers: int | None = None
    faults: str = ""
    stopped: int | None = None  # in this step
    by: signal.Signals = signal.SIGTERM  # how it is stopped
    exchange: str = "shared"


@dataclass(frozen=True)
class Way:
    """Starts, one after the other, over the same directory."""

    starts: tuple[Start, ...]
    loaders: int = 0
    is_everywhere: bool = False  # for programs that say so alone

    @property
    def has_several(self) -> bool:
        return any((one.workers or 1) > 1 for one in self.starts)

    @property
    def is_disturbed(self) -> bool:
        return len(self.starts) > 1 or any(one.faults for one in self.starts)

    @property
    def is_crashed(self) -> bool:
        return any(one.by == signal.SIGKILL for one in self.starts)

    @property
    def can_be(self) -> bool:
        return has_accelerator() or all(device_of(one.exchange) == "cpu" for one in self.starts)


def _killed(workers: int, rank: int, at: str, exchange: str = "shared") -> Start:
    return Start(workers, f"kill:rank={rank},step=KILLED,at={at}", exchange=exchange)


def _everywhere(*starts: Start) -> Way:
    return Way(starts, is_everywhere=True)


WAYS = {
    "alone": Way((Start(),)),
    "two": Way((Start(2),)),
    "three": Way((Start(3),)),
    "kill0": Way((_killed(2, 0, "begin"),)),
    "kill1": Way((_killed(3, 1, "shard"),)),
    "back": Way((_killed(2, 1, "updated"),)),
    "stop12": Way((Start(stopped=6), Start(2))),
    "stop31": Way((Start(3, stopped=16), Start())),
    "loaders": Way((Start(),), loaders=2),
    "loaders2": Way((Start(2),), loaders=2),
    "loaderskill": Way((_killed(2, 1, "begin"),), loaders=2),
    "crash12": Way((Start(stopped=16, by=signal.SIGKILL), Start(2))),
    "crash31": Way((Start(3, stopped=16, by=signal.SIGKILL), Start())),
    "four": _everywhere(Start(4)),
    "staged": _everywhere(Start(2, exchange="staged")),
    "gloo": _everywhere(Start(3, exchange="gloo")),
    "zero": _everywhere(Start(2, exchange="zero")),
    "sim": _everywhere(Start(2, exchange="sim")),
    "commit": _everywhere(_killed(3, 0, "commit")),
    "killstaged": _everywhere(_killed(3, 0, "update", "staged")),
    "stop32": _everywhere(Start(3, stopped=6, exchange="staged"), Start(2, exchange="gloo")),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a program in one way: a digest, a refusal, or what went wrong with the trial."""

    digest: str = ""
    refusal: str = ""
    trouble: str = ""
    said: str = field(default="", compare=False)
    cpu_s: float = field(default=0.0, compare=False)  # of the dearest worker
    step: int = field(default=0, compare=False)  # in which it was refused
    words: str = field(default="", compare=False)  # of all refusals, as they were

    def __str__(self) -> str:
        return self.digest or self.trouble or f"“{self.refusal}”"


def script_of(body: str) -> str:
    """Make a script of what a program's user wrote."""
    return (
        f"import sys\n\nsys.path.insert(0, {str(processes.REPOSITORY)!r})\n"
        f"from tests.programs.given import *\n\nwith found(globals()):\n"
        f"{textwrap.indent(body, '    ')}"
    )


def outcome(
    body: str,
    way: Way,
    folder: Path,
    *,
    killed: int = KILLED,
    stopped: int | None = None,
    is_cold: bool = False,
) -> Outcome:
    """Run a program in one way, in a folder that is not there yet; returns what came of it.

    It is stopped in step `stopped` instead of the way's own, and a worker killed in step `killed`.
    """
    folder.mkdir(parents=True)
    (folder / "program.py").write_text(script_of(body))
    for number, start in enumerate(way.starts):
        of_start = folder / f"start-{number}"
        of_start.mkdir()
        is_stopped = start.stopped is not None
        given = {
            **_variables(of_start, way, start),
            "PROGRAM_STOPS": str(stopped or start.stopped if is_stopped else -1),
            "PROGRAM_STOPPED_BY": str(int(start.by)),
            "UNISONO_FAULTS": start.faults.replace("KILLED", str(killed)),
        }
        status, said = _run(start, given, subprocess.Popen if is_cold else processes.start)
        if is_stopped and status in (128 + start.by, -start.by):
            continue
        found = [json.loads(one.read_text()) for one in sorted(of_start.glob("found-*"))]
        if is_stopped and status == 0:
            return Outcome(trouble="was not stopped", said=said)
        return _judged(status, said, found, start, any(of_start.glob("joined-*")))
    raise AssertionError("the last start is never stopped")


def _variables(of_start: Path, way: Way, start: Start) -> dict[str, str]:
    """Tell a program where it leaves what it finds, and how it is to read its data."""
    return {
        "PROGRAM_FOLDER": str(of_start),
        "PROGRAM_DIRECTORY": f"{of_start.parent}/run" if len(way.starts) > 1 else "",
        "PROGRAM_LOADERS": str(way.loaders),
        "PROGRAM_DEVICE": device_of(start.exchange),
        **(variables_of(start.exchange) if way.is_everywhere else {}),
        "UNISONO_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _run(start: Start, given: dict[str, str], popen: Any) -> tuple[int | None, str]:
    """Start a program; returns its exit status, None if it had none in time, and its output."""
    starter = () if start.workers is None else ("-m", "unisono", "run", "-n", str(start.workers))
    of_start = Path(given["PROGRAM_FOLDER"])
    output = of_start / "output"
    with output.open("w") as out:
        process = popen(
            [sys.executable, *starter, str(of_start.parent / "program.py")],
            stdout=out,
            stderr=out,
            cwd=of_start.parent,
            env={**os.environ, **given},
            start_new_session=True,
        )
        status = _waited_for(process, of_start / STOP, start.by)
    return status, output.read_text(errors="replace")


def _waited_for(process: subprocess.Popen[bytes], stop: Path, by: int) -> int | None:
    """Wait for the end of a program, and stop it when it asks for that."""
    end_s, is_stopped = time.monotonic() + TIMEOUT_S, False
    while (status := process.poll()) is None:
        if time.monotonic() > end_s:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        if not is_stopped and stop.exists():
            is_stopped = True
            process.send_signal(by)
        time.sleep(0.02)
    return status


def _judged(
    status: int | None, said: str, found: list[dict], start: Start, has_joined: bool
) -> Outcome:
    cpu_s = max((one["cpu_s"] for one in found), default=0.0)
    if status is None:
        return Outcome(trouble="no end in time", said=said)
    if status == 0:
        if len(found) < (start.workers or 1):
            return Outcome(trouble="a worker left without a word", said=said)
        if start.faults and not has_joined:
            why = [_normal(one["error"]) for one in found if "error" in one]
            said_why = "; ".join(why) or "nobody has joined"
            return Outcome(trouble=f"proves nothing: {said_why}", said=said)
        results = {json.dumps([one["digests"], one["result"]], sort_keys=True) for one in found}
        return Outcome("|".join(sorted(map(_short, results))), said=said, cpu_s=cpu_s)
    errors = {_normal(one["error"]) for one in found if "error" in one}
    own = {one for one in errors if not one.startswith(_PEERS)} or errors
    if not own:
        return Outcome(trouble=f"status {status}", said=said)
    step, words = (
        max(one["step"] for one in found),
        " / ".join(one.get("error", "") for one in found),
    )
    return Outcome(refusal=" / ".join(sorted(own)), said=said, step=step, words=words)


def _short(result: str) -> str:
    """Hash a result in eight digits."""
    return hashlib.sha256(result.encode()).hexdigest()[:8]


def _normal(error: str) -> str:
    """Leave out what differs between ways that refuse for the same reason."""
    error = re.sub(r"0x[0-9a-f]+", "0x…", error)
    error = re.sub(r"\b(ranks?|step|shard|sample|epoch) \d+( and \d+)?", r"\1 N", error)
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", error)
