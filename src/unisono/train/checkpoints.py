"""A run's checkpoints: when one is due, where it goes, and how it is taken up at the next start.

They are written from snapshots, by the launcher or, in a process that nobody launched, by a thread,
while training goes on. At the start the leader finds the newest one that is whole; every worker
then reads it for itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono import device
from unisono.checkpoint.directory_lock import Place, place_of
from unisono.checkpoint.every import Every
from unisono.checkpoint.folder import read_folder
from unisono.checkpoint.run_directory import RunDirectory
from unisono.checkpoint.writer import CheckpointWriter, Kept
from unisono.errors import CheckpointError
from unisono.exchange.arena import Arena
from unisono.faults import FAULTS_VARIABLE, disk_full, read_faults
from unisono.plan.samples import SamplePlan
from unisono.state.contents import updated_parameters
from unisono.state.position import Position
from unisono.state.saved import Snapshot
from unisono.train.directory_use import DirectoryUse
from unisono.train.totals import Totals
from unisono.whole import check_whole
from unisono.workers.jobname import num_restarts
from unisono.workers.team import Team
from unisono.world import threads_per_worker

RESUME = ("auto", "never")


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The checkpoint that a run goes on from.

    Attributes:
        path: its folder.
        snapshot: what it says.
        is_ahead: whether it was made in a later loop than the one that is about to begin.
    """

    path: str
    snapshot: Snapshot
    is_ahead: bool


class Checkpoints:
    """Writes and takes up the checkpoints of one run. Final.

    Args:
        team: the workers.
        directory: the run directory.
        every: the interval, as :meth:`Every.read` understands it; None: only at the end.
        keep: how many stay.
        resume: ``"auto"`` takes up the newest that is whole, ``"never"`` none.
        say: where words for the user go.

    Raises:
        ValueError: an option does not fit.
    """

    def __init__(
        self,
        team: Team,
        directory: Path,
        every: int | str | None,
        keep: int,
        resume: str,
        say: Callable[[str], None],
    ) -> None:
        self._keep = check_whole("keep", keep, at_least=1)
        if resume not in RESUME:
            raise ValueError(f"`resume` must be one of {RESUME}, but is {resume!r}.")
        self._team = team
        # The program may go to another folder before the first loop.
        self.directory = Path(directory).absolute()
        self._turn = DirectoryUse(self.directory)
        self._every = None if every is None else Every.read(every)
        self._resume = resume == "auto"
        self.say = say
        faults = read_faults(os.environ.get(FAULTS_VARIABLE, ""))
        self._writer = CheckpointWriter(say, lambda number: disk_full(faults, number))
        self._kept_at_s = time.monotonic()
        self._kept_step: int | None = None
        self._kept_by: int | None = None
        self._place: Place | None = None
        self._is_kept_elsewhere = False

    @property
    def kept_step(self) -> int | None:
        """How many steps the run had done at its newest checkpoint; None before the first."""
        return self._kept_step

    @property
    def facts(self) -> dict[str, Any]:
        """What whoever writes checkpoints has to know."""
        return {"directory": str(self.directory), "keep": self._keep}

    @property
    def _store(self) -> RunDirectory:
        return RunDirectory(self.directory, self._keep)

    def take_turn(self) -> None:
        """Go on in the directory, after the first loop; every rank does it.

        Raises:
            ValueError: another run of this program has begun there since this one did.
        """
        self._turn.take()

    def go_to(self, directory: str) -> None:
        """Begin in the directory that the leader has named; every rank does it.

        With a time or a process in its name each worker has made another one of it.
        """
        if not self._turn.has_begun:
            self.directory = Path(directory)
            self._turn = DirectoryUse(self.directory)
            self._turn.take()
        self._place = place_of(self.directory)

    def find(
        self,
        plan: SamplePlan,
        totals: Totals,
        identity: Mapping[str, Any],
        at_most: Mapping[str, int],
    ) -> FoundCheckpoint | None:
        """Find the checkpoint to go on from; the leader does it.

        Args:
            plan: which samples are computed where.
            totals: how far the loop that is about to begin goes.
            identity: the run's.
            at_most: by file of a checkpoint, how many bytes there is a use for.

        Raises:
            ValueError: another run of this program has begun there since this one was made.
            CheckpointError: the run was another one, or another job uses the directory.
        """
        self._turn.take()
        self._claim()
        if not self._resume:
            self._set_aside(-1)
            return None
        snapshot, entry, passed_over = self._store.newest(Snapshot.from_files, at_most)
        for other in passed_over:
            self.say(f"checkpoint {other.path.name} is passed over: {other.trouble}")
        if snapshot is None or entry is None:
            self._set_aside(-1)
            if num_restarts(os.environ) and not passed_over:
                self.say(
                    f"the job was started again, but {self.directory} has no checkpoint to go on "
                    f"from: the run begins anew. Let `directory` have the same name in each start, "
                    f"without a time or the number of a process."
                )
            return None
        position = Position(**snapshot.facts["position"])
        if totals.are_passed(position):
            compare(snapshot.facts["identity"], of_every_loop(identity))
            self.say(
                f"nothing to do here: the run has come to step {position.step} already, with "
                f"checkpoint {entry.path.name} in {self._store.folder}; a later call goes on there"
            )
            return FoundCheckpoint(str(entry.path), snapshot, is_ahead=True)
        for warning in compare(snapshot.facts["identity"], identity):
            self.say(warning)
        if position.batch >= plan.steps_per_epoch:
            raise CheckpointError(
                f"a checkpoint must be of a place within an epoch of {plan.steps_per_epoch} steps, "
                f"but {entry.path.name} is of {snapshot.facts['position']}: it was changed."
            )
        self._set_aside(position.step)
        self.say(f"going on from checkpoint {entry.path.name} in {self._store.folder}")
        return FoundCheckpoint(str(entry.path), snapshot, is_ahead=False)

    def read(self, path: str) -> Snapshot:
        """Read a checkpoint that the leader has found.

        Raises:
            CheckpointError: it is not there any more.
        """
        return Snapshot.from_files(read_folder(Path(path)))

    def begin(self, step: int | None) -> None:
        """Count from here; `step` is that of the checkpoint the run goes on from."""
        self._kept_at_s = time.monotonic()
        self._kept_step = step

    def is_due(self, after: Position) -> bool:
        """Tell, as the leader, whether a checkpoint is due at this place."""
        if self._is_kept_elsewhere:
            return True
        if self._kept_by is not None and self._kept_by not in self._team.membership.ranks:
            # The leader before was lost, perhaps before it could ask for what was due.
            return True
        if self._every is None:
            return False
        ended = after.epoch if after.batch == 0 else 0
        waited_s = time.monotonic() - self._kept_at_s
        return self._every.is_due(steps=after.step, epoch_ended=ended, seconds=waited_s)

    def keep(self, arena: Arena, slot: int, step: int, *, wait: bool) -> None:
        """Have a snapshot written, unless this step's is; the leader asks, all take notice.

        Args:
            arena: holds it.
            slot: which of its two.
            step: steps done.
            wait: return on the leader only when it is on the disk, or has failed.
        """
        is_new = self._kept_step != step
        self._is_kept_elsewhere = False
        self._kept_step, self._kept_at_s = step, time.monotonic()
        self._kept_by = self._team.membership.leader
        if not self._team.is_leader:
            return
        kept = Kept.of(arena.places, slot, step, str(self.directory), self._keep)
        supervisor = self._team.supervisor
        if (is_new or wait) and not supervisor.write_checkpoint(kept.as_json(), wait=wait):
            self._writer.begin(arena.memory.mapping, kept)
        if wait:
            self._writer.wait()

    def hold(self) -> str:
        """See that the run directory is the one that the run has begun in; any rank may ask.

        What has its name now is claimed, if it was removed or replaced, and a checkpoint is due.

        Returns:
            Why nothing may be written there; empty where all is well.
        """
        if self._place is None or place_of(self.directory) == self._place:
            return ""
        try:
            self._claim()
        except CheckpointError as error:
            return str(error)
        place = place_of(self.directory)
        if place is not None and place != self._place:  # else it cannot be seen just now
            self._place = place
            self._is_kept_elsewhere = self._kept_step is not None
        return ""

    def tell_slow_disk(self, waited_s: float) -> None:
        """Say that training waits for an earlier checkpoint to be written."""
        self.say(
            f"training has waited {waited_s:.0f} s for the disk to take the checkpoint before: "
            f"look at {self.directory}, or let checkpoints be rarer."
        )

    def _claim(self) -> None:
        """Keep other jobs out of the directory as long as this one lasts."""
        if not self._team.supervisor.lock_directory(str(self.directory)):
            self._writer.locks.hold(self.directory)

    def _set_aside(self, step: int) -> None:
        for name in self._store.set_aside(step):
            self.say(f"checkpoint {name} is of another past and is set aside")


def identity(plan: SamplePlan, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Say what fixes a run's bits, besides its code and data; `fixed` is what the run adds."""
    return {
        "seed": plan.seed,
        "shards": plan.shards,
        "batch_size": plan.batch_size,
        "sampler": plan.sampler,
        "shuffle": plan.shuffle,
        "dataset length": plan.num_samples,
        **fixed,
        "threads": threads_per_worker(),
        "torch": torch.__version__,
        "processor": device.facts(),
    }


def fixed_by(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Say what of an optimizer belongs to a run's identity: what it is, and what it updates."""
    names = list(updated_parameters(model, optimizer))
    return {
        "optimizer": type(optimizer).__qualname__,
        "updated parameters": f"{len(names)} from `{names[0]}` to `{names[-1]}`",
    }


_OF_ONE_LOOP = ("batch_size", "shuffle", "sampler", "dataset length")
_MUST_STAY = ("seed", "shards", *_OF_ONE_LOOP, "optimizer")


def of_every_loop(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out of a run's identity what another loop of it may have otherwise."""
    return {name: value for name, value in identity.items() if name not in _OF_ONE_LOOP}


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the identity of a checkpoint with that of the run that takes it up.

    Returns:
        Warnings: what differs and changes bits, but not what is trained on.

    Raises:
        CheckpointError: what decides over samples or updates differs; names old and new value.
    """
    warnings = []
    for name, value in new.items():
        if name not in old or old[name] == value:
            continue
        if name in _MUST_STAY:
            raise CheckpointError(
                f"`{name}` must be {old[name]!r:.200} as in the checkpoint, but is {value!r}: "
                f"pass the "
                f'old value, another `directory`, or `resume="never"`.'
            )
        warnings.append(
            f"{name} was {old[name]!r:.200} in the checkpoint and is {value!r} now: the run goes "
            f"on, but its bits will not be those of a run without a stop."
        )
    return warnings
