"""Faults on purpose, as a table: which worker fails, at which step, and how.

``UNISONO_FAULTS="kill:rank=1,step=30; stop:rank=2,step=50,at=update; disk-full:checkpoint=2"``

=========  ===========================  ==========================================================
kind       fields                       what happens
=========  ===========================  ==========================================================
kill       rank, step, [at]             the worker gets SIGKILL
stop       rank, step, [at]             the worker gets SIGSTOP: it is there and does not move
raise      rank, step, [at]             RuntimeError
exit       rank, step, [at]             the process ends at once, with status 0
segv       rank, step, [at]             the worker gets SIGSEGV
disk-full  checkpoint (the first is 1)  the disk is full when this checkpoint is written
=========  ===========================  ==========================================================

=========  =======================================================================================
at         where in a step
=========  =======================================================================================
begin      when it begins; without ``at``, here
shard      before the forward pass of a shard
gradients  the own shards are done; before the others are met
sums       all shards are done; before they are added up
update     the own sums are done; before the optimizer
updated    the own update is done; before the second meeting
commit     after the second meeting
snapshot   while a snapshot is being copied
start      before the script runs; has no step
join       a replacement has just been admitted; needs no step
=========  =======================================================================================

Steps count from 0 over the whole run. A fault happens once: to the first process that has the
rank (the second, with ``at=join``), and only the first time that it comes by.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

FAULTS_VARIABLE = "UNISONO_FAULTS"
DEEDS = ("kill", "stop", "raise", "exit", "segv")
PLACES = (
    "begin",
    "shard",
    "gradients",
    "sums",
    "update",
    "updated",
    "commit",
    "snapshot",
    "start",
    "join",
)
_FIELDS = dict.fromkeys(DEEDS, ("rank", "step", "at")) | {
    "disk-full": ("checkpoint",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table."""

    kind: str  # what happens
    rank: int | None = None  # to whom; None for the launcher
    step: int | None = None  # when, counted from 0; None: at any step
    at: str = ""  # where in the step; empty for kinds that have no place
    # the number of the checkpoint that is being written, the first is 1
    checkpoint: int | None = None


def read_faults(text: str) -> tuple[Fault, ...]:
    """Understand the table.

    Raises:
        ValueError: a kind, a field or a place is unknown, or one is missing or no number.
    """
    return tuple(_read(row.strip()) for row in text.split(";") if row.strip())


def due(faults: tuple[Fault, ...], *, step: int | None, at: str) -> Fault | None:
    """Find the first of a worker's faults that is due here."""
    for fault in faults:
        if fault.kind in DEEDS and fault.at == at and fault.step in (None, step):
            return fault
    return None


def disk_full(faults: tuple[Fault, ...], checkpoint: int) -> bool:
    """Tell whether the disk is to be full for a checkpoint, the first of which is 1."""
    return Fault("disk-full", checkpoint=checkpoint) in faults


class Faults:
    """The faults of this process. Final.

    Args:
        mine: those that are still to come.
    """

    def __init__(self, mine: tuple[Fault, ...] = ()) -> None:
        self._mine = mine

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], rank: int, incarnation: int) -> Faults:
        """Read what concerns this process from ``UNISONO_FAULTS``.

        Args:
            environ: the process's variables.
            rank: of this worker.
            incarnation: how many processes had the rank before.

        Raises:
            ValueError: the table is not understood.
        """
        faults = read_faults(environ.get(FAULTS_VARIABLE, ""))
        mine = (fault for fault in faults if fault.rank == rank)
        here = (fault for fault in mine if incarnation == (1 if fault.at == "join" else 0))
        return cls(tuple(here))

    def meet(self, at: str, step: int | None = None) -> None:
        """Do what is due at a place; may not return.

        Raises:
            RuntimeError: this was asked for.
        """
        if not self._mine:
            return
        fault = due(self._mine, step=step, at=at)
        if fault is not None:
            self._forget(fault)
            _do(fault.kind, at, step)

    def _forget(self, fault: Fault) -> None:
        place = self._mine.index(fault)
        self._mine = self._mine[:place] + self._mine[place + 1 :]


def _do(kind: str, at: str, step: int | None) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "exit":
        os._exit(0)
    elif kind == "segv":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        signal.raise_signal(signal.SIGSEGV)
    else:
        when = "" if step is None else f" of step {step}"
        raise RuntimeError(f"a failure at {at}{when}, asked for by {FAULTS_VARIABLE}")


def _read(row: str) -> Fault:
    kind, _, rest = (part.strip() for part in row.partition(":"))
    if kind not in _FIELDS:
        must = f"the kind must be one of {', '.join(_FIELDS)}"
        raise _refused(row, must, kind, "write `kill:rank=1,step=3`, say")
    fields: dict[str, str] = {}
    for pair in rest.split(",") if rest else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        if key not in _FIELDS[kind] or key in fields:
            must = f"the fields of {kind} must be {', '.join(_FIELDS[kind])}, each once"
            raise _refused(row, must, pair.strip(), "write `field=value`, with commas in between")
        fields[key] = value
    at = fields.pop("at", "begin" if "at" in _FIELDS[kind] else "")
    if "at" in _FIELDS[kind] and at not in PLACES:
        raise _refused(row, f"`at` must be one of {', '.join(PLACES)}", at, "choose one")
    numbers = {key: _number(row, key, value) for key, value in fields.items()}
    if at == "start" and "step" in numbers:
        raise _refused(row, "`at=start` must have no step", numbers["step"], "leave `step` out")
    for key in _FIELDS[kind]:
        is_needed = key != "at" and not (key == "step" and at in ("start", "join"))
        if is_needed and key not in numbers:
            raise _refused(row, f"{kind} must have a `{key}`", None, f"write `{key}=1`, say")
    return Fault(kind, at=at, **numbers)


def _number(row: str, key: str, value: str) -> int:
    least = 1 if key == "checkpoint" else 0
    if not re.fullmatch("[0-9]{1,18}", value) or int(value) < least:
        must = f"`{key}` must be a whole number of at least {least}"
        raise _refused(row, must, value, f"write `{key}={least + 1}`, say")
    return int(value)


def _refused(row: str, must: str, seen: object, advice: str) -> ValueError:
    return ValueError(f"in `{FAULTS_VARIABLE}`, {must}, but is {seen!r} in {row!r}: {advice}.")
