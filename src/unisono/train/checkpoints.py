"""A trainer's checkpoints: written by rank 0 between two steps, taken up again at the next start.

Between two steps nobody writes to the shared state before rank 0 has come to the next meeting, so
rank 0 may look at its clock, decide and write alone; the others need not be asked. On the way back
rank 0 reads the state and everybody takes it from there, as at every start of a loop.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.contents import Snapshot, put_back, put_back_groups, take
from unisono.checkpoint.every import Every
from unisono.checkpoint.store import Store
from unisono.errors import CheckpointError
from unisono.plan.samples import SamplePlan
from unisono.train.run import Position, Run, check_whole
from unisono.world import threads_per_worker

RESUME = ("auto", "never")


class Checkpoints:
    """Writes and takes up the checkpoints of one run. Final.

    Args:
        run: what is kept.
        directory: the run directory.
        every: the interval, as :meth:`Every.read` understands it; None: only at the end.
        keep: how many stay.
        resume: ``"auto"`` takes up the newest that is whole, ``"never"`` none.

    Raises:
        ValueError: an option does not fit.
    """

    def __init__(
        self, run: Run, directory: Path, every: int | str | None, keep: int, resume: str
    ) -> None:
        check_whole("keep", keep, at_least=1)
        if resume not in RESUME:
            raise ValueError(f"`resume` must be one of {RESUME}, but is {resume!r}.")
        self._run = run
        self._store = Store(directory, keep)
        self._every = None if every is None else Every.read(every)
        self._resume = resume == "auto"
        self._is_taken_up = False
        self._written_at_s = time.monotonic()
        self._last_step: int | None = None

    def take_up(self, plan: SamplePlan, say: Callable[[str], None]) -> None:
        """Go on from the newest checkpoint, at the first call only. Collective.

        Raises:
            CheckpointError: the run was another one, or its state does not fit this model.
        """
        if self._is_taken_up:
            return
        self._is_taken_up = True
        answer: dict[str, Any] = {}
        if self._run.world.rank == 0:
            try:
                answer = self._read(plan, say)
                step = answer["position"]["step"] if answer else 0
                for name in self._store.set_aside(step):
                    say(f"checkpoint {name} is of another past and is set aside")
            except (CheckpointError, OSError) as error:
                answer = {"error": str(error)}
        heard = self._run.team.gather(json.dumps(answer).encode(), "taking up")
        answer = json.loads(heard[0])
        if "error" in answer:
            raise CheckpointError(answer["error"])
        if answer:
            self._run.take_position(Position(**answer["position"]), plan)
            self._last_step = self._run.position.step
            put_back_groups(answer["groups"], self._run.optimizer)

    def after_step(self, plan: SamplePlan, say: Callable[[str], None]) -> None:
        """Write a checkpoint if one is due; rank 0 alone does anything."""
        position = self._run.position
        if self._every is None or self._run.world.rank != 0:
            return
        ended = position.epoch if position.batch == 0 else 0
        waited_s = time.monotonic() - self._written_at_s
        if self._every.is_due(steps=position.step, epoch_ended=ended, seconds=waited_s):
            self.write(plan, say)

    def write(self, plan: SamplePlan, say: Callable[[str], None]) -> None:
        """Write a checkpoint of this moment, unless there is one; rank 0 alone does anything.

        A disk that is full or broken ends no run: it is told, and the next checkpoint is tried.
        """
        run = self._run
        if run.world.rank != 0 or self._last_step == run.position.step:
            return
        facts = {"position": asdict(run.position), "identity": identity(plan)}
        files = take(run.model, run.optimizer, facts).files()
        try:
            self._store.write(run.position.step, files)
            self._last_step = run.position.step
        except OSError as error:
            num_bytes = sum(map(len, files.values()))
            say(f"step {run.position.step}: no checkpoint: {_told(error, self._store, num_bytes)}")
        self._written_at_s = time.monotonic()

    def _read(self, plan: SamplePlan, say: Callable[[str], None]) -> dict[str, Any]:
        if not self._resume:
            return {}
        snapshot, entry, passed_over = self._store.newest(Snapshot.from_files)
        for other in passed_over:
            say(f"checkpoint {other.path.name} is passed over: {other.trouble}")
        if snapshot is None or entry is None:
            return {}
        warnings = compare(snapshot.facts["identity"], identity(plan))
        put_back(snapshot, self._run.model, self._run.optimizer)
        for warning in warnings:
            say(warning)
        say(f"going on from checkpoint {entry.path.name} in {self._store.folder}")
        return {"position": snapshot.facts["position"], "groups": snapshot.facts["groups"]}


def identity(plan: SamplePlan) -> dict[str, Any]:
    """Say what fixes a run's bits, besides its code and data."""
    return {
        "seed": plan.seed,
        "shards": plan.shards,
        "batch_size": plan.batch_size,
        "shuffle": plan.shuffle,
        "dataset length": plan.num_samples,
        "threads": threads_per_worker(),
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability() + " " + platform.machine(),
    }


_MUST_STAY = ("seed", "shards", "batch_size", "shuffle", "dataset length")


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the identity of a checkpoint with that of the run that takes it up.

    Returns:
        Warnings: what differs and changes bits, but not what is trained on.

    Raises:
        CheckpointError: what decides over samples differs; names old and new value.
    """
    warnings = []
    for name, value in new.items():
        if name not in old or old[name] == value:
            continue
        if name in _MUST_STAY:
            raise CheckpointError(
                f"`{name}` must be {old[name]!r} as in the checkpoint, but is {value!r}: pass the "
                f'old value, another `directory`, or `resume="never"`.'
            )
        warnings.append(
            f"{name} was {old[name]!r} in the checkpoint and is {value!r} now: the run goes on, "
            f"but its bits will not be those of a run without a stop."
        )
    return warnings


def _told(error: OSError, store: Store, num_bytes: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(_existing(store.folder)).free
        return (
            f"the disk must have {num_bytes:,} bytes free, but has {free:,} "
            f"({max(0, num_bytes - free):,} too few); training goes on, the next one is tried."
        )
    return f"{error}; training goes on, the next one is tried."


def _existing(path: Path) -> Path:
    while not os.path.exists(path):
        path = path.parent
    return path
