"""A run's checkpoints: when one is due, where it is stored, and how the next start finds it.

They are written from snapshots while training continues: by the launcher, or by a thread if there
is none. At the start the leader finds the newest complete one; every worker then reads it.

Only one trainer of a program may use a run directory at a time. A run may continue where an earlier
one stopped, as when a notebook cell is run again; two trainers that take turns would each take the
other's checkpoints for its own.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from unisono.engine.exchange.snapshots import Snapshots
from unisono.engine.state.run_state import Position
from unisono.engine.state.saved import CheckpointData, facts_in
from unisono.errors import CheckpointError
from unisono.plan.samples import SamplePlan
from unisono.programs.kept import KEY
from unisono.programs.reduced import without_tensors
from unisono.runtime.checkpoint.folder import (
    RUN_FILE,
    digest_of_state,
    read_folder,
    read_run_file,
)
from unisono.runtime.checkpoint.remote import await_answer, local_folder, url_of
from unisono.runtime.checkpoint.run_directory import (
    ENDED,
    IDLE,
    PASSED,
    CheckpointEntry,
    FileId,
    HeldElsewhereError,
    RunDirectory,
    file_id_of,
    step_of,
)
from unisono.runtime.checkpoint.sealed import HeldAt, Sealed
from unisono.runtime.checkpoint.writer import CheckpointWriter, SlotToWrite
from unisono.runtime.faults import FAULTS_VARIABLE, disk_full, read_faults
from unisono.runtime.notices import plural
from unisono.runtime.plainfile import path_given
from unisono.runtime.timeouts import REMOTE
from unisono.runtime.workers.job_store import num_restarts
from unisono.runtime.workers.team import Team
from unisono.runtime.world import per_process
from unisono.training.identity import compare, of_every_loop
from unisono.training.loop_plan import Totals
from unisono.training.options import OF_PROGRAM, Checkpoint, Every

_LOST_HOST_HOLDS_S, _LOOK_EVERY_S = 120.0, 1.0  # servers of NFS 4 drop its locks after 90 s


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The checkpoint from which a run continues."""

    path: str  # its folder
    snapshot: CheckpointData  # its content
    is_ahead: bool  # whether the loop about to begin had ended by then
    is_later: bool = False  # and whether a later loop made it
    has_ended: bool = False  # whether that loop made it when it ended
    was_passed: bool = False  # whether the program left that loop there, and began another
    # what is left of the end of a loop that is no longer kept: position, `last`, `program`
    left: Mapping[str, Any] | None = None


@final
class _Runs:
    """How many runs of this process have begun in one directory, and with what."""

    def __init__(self, directory: str) -> None:
        self.num_begun = 0
        self.begun_as: set[str] = set()


@final
class Checkpoints:
    """Writes and finds the checkpoints of one run."""

    def __init__(
        self,
        team: Team,
        directory: str | os.PathLike[str],
        saving: Checkpoint,
        say: Callable[[str], None],
    ) -> None:
        self._team, self._saving, self._say = team, saving, say
        self.url = url_of(directory)
        # None: only at the end
        self.every = None if saving.every is None else Every.read(saving.every)
        # The program may change its working directory before the first loop.
        self.directory = (local_folder(self.url) if self.url else path_given(directory)).absolute()
        self._read_runs()
        faults = read_faults(os.environ.get(FAULTS_VARIABLE, ""))
        self._writer = CheckpointWriter(say, lambda number: disk_full(faults, number))
        self._kept_at_s = time.monotonic()
        self.kept_step: int | None = None
        self._kept_by: int | None = None
        self._place: FileId | None = None
        self._is_kept_elsewhere = self.is_on_each_host = False
        self.misses_end = False  # and the user knows
        # Whether earlier runs of this process began in the directory, all with something else.
        self.is_another: bool | None = None
        self._is_open = False  # whether this worker has opened the URL
        # The newest checkpoint, read and reported once, if a later loop made it.
        self._ahead: tuple[CheckpointData, CheckpointEntry, list[CheckpointEntry]] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint writer needs to know."""
        return {"directory": str(self.directory), "keep": self._saving.keep}

    @property
    def _run_directory(self) -> RunDirectory:
        return RunDirectory(self.directory, self._saving.keep)

    def note_beginning(self, begins_as: str) -> None:
        """Compare what this run begins with to what earlier runs of the process began with."""
        if self.is_another is None:
            earlier = self._runs.begun_as
            self.is_another = bool(earlier) and begins_as not in earlier
            earlier.add(begins_as)

    def _read_runs(self) -> None:
        self._runs = per_process(_Runs, os.path.realpath(self.directory))
        self._num_seen, self._has_begun = self._runs.num_begun, False

    def open(self) -> None:
        """Begin or continue in the directory. Every rank calls it."""
        if self._runs.num_begun != self._num_seen:
            raise ValueError(
                f"`directory` must belong to one trainer, but another one of this program began in "
                f"{self.directory} after this one was created: give each its own directory."
            )
        if not self._has_begun:
            self._has_begun = True
            self._runs.num_begun += 1
            self._num_seen = self._runs.num_begun

    def use_directory(self, directory: str) -> None:
        """Begin in the leader's directory, as names with a time differ. Every rank calls it."""
        if not self._has_begun:
            self.directory = Path(directory)
            self._read_runs()
            self.open()
        self._place = file_id_of(self.directory)

    def begin_in_directory(self) -> None:
        """Begin in the directory, and lock it; called by the leader before :meth:`find`."""
        self.open()
        self._await_claim()
        self._check_place()

    def find(
        self,
        plan: SamplePlan,
        totals: Totals,
        identity: Mapping[str, Any],
        at_most: Mapping[str, int],
        loop: str,
        number: int,
        fits: Callable[[CheckpointData], None],
    ) -> FoundCheckpoint | None:
        """Return the checkpoint from which the next loop continues; called by the leader.

        `loop` describes that loop, the program's `number`-th. `fits` raises if the model differs,
        before anything else is compared.
        """
        if self._saving.resume == "never":
            self.set_aside(-1)
            return None
        snapshot, entry, passed_over = self._ahead or self._run_directory.newest(
            CheckpointData.from_files, at_most
        )
        if passed_over and entry is None:
            raise _all_damaged(self._run_directory, passed_over)
        for other in passed_over:
            self._say(f"checkpoint {other.path.name} is skipped: {other.trouble}")
        if snapshot is None or entry is None:
            if num_restarts(os.environ):
                self._say(
                    f"the job was restarted, but {self.directory} contains no checkpoint: training "
                    f"starts over. Pass the same `directory` at every start, without a time or a "
                    f"process ID in its name."
                )
            return None
        position = Position(**snapshot.facts["position"])
        end = self._run_directory.end_of(loop, position.step)
        was_left = totals.were_left(snapshot.facts["last"], number)
        if end is not None or was_left or totals.are_passed(position):
            compare(snapshot.facts["identity"], of_every_loop(identity))
            if self._ahead is None:
                self._say(
                    f"nothing to do here: the run has already reached step {position.step}, with "
                    f"checkpoint {entry.path.name} in {self._run_directory.folder}; a later call "
                    f"continues from it"
                )
            self._ahead = snapshot, entry, []
            return self._end_of_loop(end, loop) or FoundCheckpoint(
                str(entry.path),
                snapshot,
                is_ahead=True,
                is_later=True,
                left=self._left_of_end(loop, at_most[RUN_FILE]),
            )
        self._ahead = None
        fits(snapshot)
        for warning in compare(
            snapshot.facts["identity"],
            identity,
            in_epoch=position.epoch + 1 if position.batch else None,
            takes_program=self._saving.options == OF_PROGRAM,
        ):
            self._say(warning)
        # What a batch sampler cuts may depend on what is restored later.
        if plan.cuts is None and position.batch >= plan.steps_per_epoch:
            raise CheckpointError(
                f"a checkpoint must be at a step within an epoch of {plan.steps_per_epoch} steps, "
                f"but {entry.path.name} is at {snapshot.facts['position']}: it was modified."
            )
        self.set_aside(position.step)
        self._say(f"resuming from checkpoint {entry.path.name} in {self._run_directory.folder}")
        marks = self._run_directory.marks(position.step)
        return FoundCheckpoint(
            str(entry.path),
            snapshot,
            is_ahead=False,
            has_ended=ENDED + loop in marks,
            was_passed=PASSED + loop in marks,
        )

    def _end_of_loop(self, end: Path | None, loop: str) -> FoundCheckpoint | None:
        """Return what a finished loop ended with; None if that was not kept."""
        trouble = "is no longer kept"
        if end is not None:
            try:
                has_ended = ENDED + loop in self._run_directory.ends()[step_of(end.name) or 0]
                read = self.read(str(end))
                return FoundCheckpoint(str(end), read, is_ahead=True, has_ended=has_ended)
            except CheckpointError as error:
                trouble = f"in {end.name} is damaged ({str(error).removesuffix('.')})"
        if self.misses_end:
            return None
        self.misses_end = True
        self._say(
            f"the final state of this call {trouble}: until the call that resumes, the program "
            f"sees the newest weights, also where it evaluates or saves them"
        )
        return None

    def _left_of_end(self, loop: str, at_most: int) -> Mapping[str, Any] | None:
        """Return what the program had when a loop ended, without tensors; None if not kept."""
        with suppress(CheckpointError, OSError):
            if (path := self._run_directory.reduced_end_of(loop)) is not None:
                facts = facts_in(read_run_file(path, at_most))
                program = without_tensors(facts["state"].get(KEY))
                return {"position": facts["position"], "last": facts["last"], "program": program}
        return None

    def mark_passed(self) -> None:
        """Record that another loop begins: if the program left the one before, it did not end."""
        with suppress(OSError):
            if self.kept_step is not None and self._writes:
                self._run_directory.mark_passed(self.kept_step)

    def mark_idle(self, loop: str) -> None:
        """Record that a loop has no step."""
        with suppress(OSError):
            if self.kept_step is not None and self._writes:
                self._run_directory.mark_end(self.kept_step, IDLE + loop)

    def complete_here(self) -> dict[int, str]:
        """Return digests of the complete checkpoints on a host with its own directory, by step."""
        self._await_claim()
        self._check_place()
        found = [] if self._saving.resume == "never" else self._run_directory.entries()
        return {one.step: digest_of_state(one.path) for one in found if not one.trouble}

    def set_aside(self, step: int) -> None:
        """Rename the folders of checkpoints later than `step`: they belong to another history."""
        for name in self._run_directory.set_aside(step):
            self._say(
                f"checkpoint {name} is later than the step from which the run resumes: its folder "
                f"is renamed to `aside-…`, and you may delete it"
            )

    def read(self, path: str, held: Mapping[str, HeldAt] = MappingProxyType({})) -> CheckpointData:
        """Read a checkpoint that the leader has found, from files it holds open, if it does."""
        opened = {name: Sealed.open(at) for name, at in held.items()}
        files = {name: file for name, file in opened.items() if file is not None}
        return CheckpointData.from_files(
            files if files and files.keys() == held.keys() else read_folder(Path(path))
        )

    def begin(self, step: int | None) -> None:
        """Start counting here; `step` is that of the checkpoint from which the run continues."""
        self._kept_at_s = time.monotonic()
        self.kept_step = step

    def is_due(self, after: Position) -> bool:
        """Return whether a checkpoint is due at this position; called by the leader."""
        if self._is_kept_elsewhere:
            return True
        if self._kept_by is not None and self._kept_by not in self._team.membership.ranks:
            # The previous leader was lost, perhaps before it could request one that was due.
            return True
        if self.every is None:
            return False
        ended = after.epoch if after.batch == 0 else 0
        waited_s = time.monotonic() - self._kept_at_s
        return self.every.is_due(steps=after.step, epoch_ended=ended, seconds=waited_s)

    def keep(
        self, snapshots: Snapshots, slot: int, step: int, *, wait: bool, end: str = ""
    ) -> None:
        """Write a snapshot, unless this step's was written; the leader asks, all record it.

        `wait`: return on the leader once it is on disk, or has failed. `end`: the loop that has
        ended with it, see :meth:`RunDirectory.mark_end`; or empty.
        """
        is_new = self.kept_step != step
        self._is_kept_elsewhere = False
        self.kept_step, self._kept_at_s = step, time.monotonic()
        self._kept_by = self._team.membership.leader
        if not self._writes:
            return
        kept = SlotToWrite(snapshots.places, slot, step, **self.facts, end=end)
        supervisor = self._team.supervisor
        if (is_new or wait) and not supervisor.write_checkpoint(kept, wait=wait):
            self._writer.begin(snapshots.mapping, kept)
        if wait:
            self._writer.wait()
            if not_saved := self._writer.not_saved:
                self._say(not_saved)

    def written(self) -> Path | None:
        """Wait for this process's writer; return the newest checkpoint's folder, if it exists."""
        self._writer.wait()
        step, found = self.kept_step, self._run_directory
        return found.path_of(step) if step is not None and found.has(step) else None

    @property
    def _writes(self) -> bool:
        return self._team.leads_host if self.is_on_each_host else self._team.is_leader

    @property
    def newest(self) -> str:
        """A description of what this worker wrote last; empty if it writes nothing."""
        return self._writer.newest

    def check_directory(self) -> str:
        """Check that the run directory is the one in which the run began; any rank may call it.

        If it was removed or replaced, lock what has its name now, and make a checkpoint due.
        Return why nothing may be written there; empty if all is well.
        """
        if self._place is None or file_id_of(self.directory) == self._place:
            return ""
        try:
            self._claim()
        except CheckpointError as error:
            return str(error)
        place = file_id_of(self.directory)
        if place is not None and place != self._place:  # otherwise it is unreachable now
            self._place = place
            self._is_kept_elsewhere = self.kept_step is not None
        return ""

    def report_slow_disk(self, waited_s: float) -> None:
        """Report that training waits for an earlier checkpoint to be written."""
        self._say(
            f"training has waited {waited_s:.0f} s for the previous checkpoint to be written: "
            f"check the disk of {self.directory}, or save checkpoints less often."
        )

    def open_remote(self, url: str, at_most: Mapping[str, int], *, owns: bool) -> None:
        """Update the directory from a URL, as the leader or the first worker of a host.

        If it `owns` the URL, the directory is copied there from now on.
        """
        self.open()
        resumes = self._saving.resume != "never"
        if (resumes or owns) and not self._is_open:
            work = {
                "url": url,
                "session": secrets.token_hex(8),
                "owns": owns,
                "resumes": resumes,
                "keep": self._saving.keep,
                "at_most": dict(at_most),
                "timeout_s": REMOTE.in_s(),
            }
            self.directory.mkdir(parents=True, exist_ok=True)
            self._await_claim(work)
            await_answer(self.directory, work)
            self._is_open = True

    def _check_place(self) -> None:
        """Raise OSError if the directory is not writable; later failures are survived."""
        self.directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.directory).close()

    def _await_claim(self, remote: Mapping[str, Any] | None = None) -> None:
        """Lock the directory, once a file server no longer counts a lost host's lock."""
        until_s, is_told = time.monotonic() + _LOST_HOST_HOLDS_S, False
        while True:
            try:
                return self._claim(remote)
            except HeldElsewhereError:
                if time.monotonic() > until_s:
                    raise
                if not is_told:
                    self._say(
                        f"{self.directory} is in use on another host: waiting up to "
                        f"{_LOST_HOST_HOLDS_S:.0f} s, in case that host is lost"
                    )
                is_told = True
                time.sleep(_LOOK_EVERY_S)

    def _claim(self, remote: Mapping[str, Any] | None = None) -> None:
        """Lock the directory against other jobs for as long as this one runs."""
        if not self._team.supervisor.lock_directory(str(self.directory), remote):
            self._writer.lock(self.directory, remote)


def _all_damaged(found: RunDirectory, entries: Sequence[CheckpointEntry]) -> CheckpointError:
    newest, others = entries[0], len(entries) - 1
    also = f", nor can the {plural(others, 'older one')}" if others else ""
    return CheckpointError(
        f"a run must resume from a complete checkpoint, but the newest in {found.folder}, "
        f"{newest.path.name}, cannot be used ({newest.trouble.removesuffix('.')}){also}: restore "
        f"one from a copy, pass an empty `directory`, or start over with "
        f'`Checkpoint(resume="never")`, which sets them aside.'
    )
