"""Injected faults, as a table: which worker fails, at which step, and how.

``UNISONO_FAULTS="kill:rank=1,step=30; stop:rank=2,step=50,at=update; disk-full:checkpoint=2"``

=========  ===========================  ==========================================================
kind       fields                       what happens
=========  ===========================  ==========================================================
kill       rank, step, [at]             the worker gets SIGKILL
stop       rank, step, [at]             the worker gets SIGSTOP: it stays alive without progress
raise      rank, step, [at]             RuntimeError
exit       rank, step, [at]             the process ends at once, with status 0
segv       rank, step, [at]             the worker gets SIGSEGV
disk-full  checkpoint (the first is 1)  the disk is full when this checkpoint is written
=========  ===========================  ==========================================================

=========  =======================================================================================
at         where in a step
=========  =======================================================================================
begin      when the step begins; the default
shard      before the forward pass of a shard
gradients  its own shards are done; before the barrier
sums       all shards are done; before they are summed
update     its own sums are done; before the optimizer
updated    its own update is done; before the second barrier
commit     after the second barrier
snapshot   while a snapshot is being copied
start      before the script runs; has no step
join       a replacement has just been admitted; needs no step
=========  =======================================================================================

Steps count from 0 over the whole run. A fault happens once: to the first process that has the
rank (the second, with ``at=join``), and only the first time that it gets there.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

FAULTS_VARIABLE = "UNISONO_FAULTS"
DEEDS = ("kill", "stop", "raise", "exit", "segv")
_IN_A_STEP = ("begin", "shard", "gradients", "sums", "update", "updated", "commit", "snapshot")
PLACES = (*_IN_A_STEP, "start", "join")


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table."""

    kind: str  # what happens
    rank: int | None = None  # the worker; None for the launcher
    step: int | None = None  # the step, counted from 0; None: any step
    at: str = ""  # the place in the step; empty for kinds without a place
    # the number of the checkpoint being written, counted from 1
    checkpoint: int | None = None


def read_faults(text: str) -> tuple[Fault, ...]:
    """Parse the table."""
    return tuple(_read(row.strip()) for row in text.split(";") if row.strip())


def disk_full(faults: tuple[Fault, ...], checkpoint: int) -> bool:
    """Return whether the disk should be full for a checkpoint, counted from 1."""
    return Fault("disk-full", checkpoint=checkpoint) in faults


@final
class Faults:
    """The faults of this process."""

    def __init__(self, mine: Iterable[Fault] = ()) -> None:
        self._mine = list(mine)
        self.are_planned = bool(self._mine)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], rank: int, incarnation: int) -> Faults:
        """Return the faults for this process from ``UNISONO_FAULTS``."""
        faults = read_faults(environ.get(FAULTS_VARIABLE, ""))
        mine = (fault for fault in faults if fault.rank == rank)
        return cls(fault for fault in mine if incarnation == (fault.at == "join"))

    def meet(self, at: str, step: int | None = None) -> None:
        """Carry out the fault that is due at a place; may not return."""
        for fault in self._mine:
            if fault.at == at and fault.step in (None, step):
                self._mine.remove(fault)
                _do(fault.kind, at, step)
                return


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
    kind, _, rest = row.replace(" ", "").partition(":")
    pairs = [pair.partition("=")[::2] for pair in rest.split(",")]
    numbers, has_place = dict(pairs), kind in DEEDS
    at = numbers.pop("at", "begin") if has_place else ""
    needed = {"rank", "step"} if has_place else {"checkpoint"}
    if at in ("start", "join"):
        needed.remove("step")
    if (
        (at not in PLACES if has_place else kind != "disk-full")
        or len(dict(pairs)) != len(pairs)
        or not needed <= numbers.keys() <= needed | ({"step"} if at == "join" else set())
        or not all(re.fullmatch("[0-9]{1,18}", value) for value in numbers.values())
    ):
        raise ValueError(
            f"in `{FAULTS_VARIABLE}`, each row must be like `kill:rank=1,step=3,at=update` or "
            f"`disk-full:checkpoint=2`, with the words of its table, but one is {row!r}."
        )
    return Fault(kind, at=at, **{name: int(value) for name, value in numbers.items()})
