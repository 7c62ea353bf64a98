"""Who answers the workers' requests? The launcher: memory, recovery, checkpoints.

    a worker's message ──► recovery.decide ──► answers to workers, marks on the control block,
    a worker was lost  ──►                     replacements, messages for the user

It decides nothing: it carries out the decisions of ``recovery``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, final

from unisono.errors import CheckpointError
from unisono.runtime.checkpoint.slots import Places
from unisono.runtime.checkpoint.writer import CheckpointWriter, SlotToWrite, newest_to_write
from unisono.runtime.launch import recovery
from unisono.runtime.launch.memories import SharedMemories
from unisono.runtime.launch.report import joined_message, loss_message
from unisono.runtime.notices import say
from unisono.runtime.signals import BETWEEN, IN_LOOP, ONCE_MORE
from unisono.runtime.workers import launcher_messages as messages
from unisono.runtime.workers.control_block import ControlBlock

# Limits on ended loops' newest snapshots in memory; older ones move to temporary files.
_ENDED_LOOPS_AT_MOST = 8
_ENDED_PARTS_OF_MEMORY = 8


class JobControl(Protocol):
    """What the request handler needs from the supervision loop."""

    def send(self, rank: int, message: messages.ToWorker) -> None:
        """Send one message to a worker."""

    def spawn(self, rank: int) -> None:
        """Start a replacement."""

    def start_again(self, lost: int | None) -> None:
        """Kill all workers that have not finished, and start them again, with the lost one."""

    def end(self) -> None:
        """End the job, which has nothing left to do."""


@final
class RequestHandler:
    """Answers the workers of one job; a thread calls `wake` once a checkpoint is written."""

    def __init__(
        self,
        control: ControlBlock,
        job: JobControl,
        state: recovery.RecoveryState,
        writer: CheckpointWriter,
        wake: Callable[[], None],
    ) -> None:
        self.state = state
        self._control = control
        self._job = job
        self._writer, self.is_saved = writer, True
        self._wake = wake
        self._memories = SharedMemories()
        # With the worker to answer, and whether only once it is written; the first is in progress.
        self._to_write: list[tuple[SlotToWrite, int | None, bool]] = []
        self._is_writing = False
        self._begun: set[int] = set()
        self._is_ending = False
        self._has_stopped_recovery = False

    @property
    def waiting(self) -> set[int]:
        """The workers that have stopped because their request has not been answered yet."""
        kept = {rank for _, rank, _ in self._to_write if rank is not None}
        return kept | self.state.stopped.keys() | self.state.asking.keys()

    def handle(self, rank: int, message: messages.FromWorker) -> None:
        """Handle a worker's message."""
        match message:
            case messages.MemoryRequest(key, num_bytes):
                self._job.send(rank, self._memory(rank, key, num_bytes))
            case messages.MemoryReleased(key):
                self._memories.release(rank, key)
                self._tidy_memories()
            case messages.Begun():
                self._begun.add(rank)
            case messages.LockRequest(directory, remote):
                self._job.send(rank, self._locked(Path(directory), remote))
            case messages.WriteRequest(kept, wait):
                self._to_write.append((kept, rank, wait))
                self._write_next()
            case _ if isinstance(message, recovery.OfRecovery):
                self._apply(recovery.received(self.state, rank, message))

    def lost(self, rank: int, pid: int | None, how: str, now: float) -> str:
        """Handle the loss of a worker, described by `how`; return why it ends the job, or ""."""
        before = self.state
        step = self._control.lines[rank].step
        in_short = f"worker {rank} {how}".partition(" (")[0]
        had_begun = rank in self._begun
        self.forget(rank)
        decision = recovery.lost(self.state, rank, now, had_begun=had_begun, how=in_short)
        if decision.trouble:
            self.state = decision.state
            return decision.trouble
        say(loss_message(rank, pid, how, step, before, decision.state))
        self._do(decision)
        return ""

    def forget(self, rank: int) -> None:
        """Forget a worker that is gone; the snapshots that it requested are still written."""
        self._begun.discard(rank)
        self._memories.forget(rank)
        self._detach(rank)

    def mark_gone(self, rank: int) -> None:
        """Record that a worker takes no further part in what the others do."""
        self._detach(rank)
        self._apply(recovery.gone(self.state, rank))

    def request_stop(self, signum: int) -> bool:
        """Request the end of the job after the current step; False if nothing would be stored."""
        if self.state.can_stop_later:
            say(f"{BETWEEN}; {ONCE_MORE}")
        elif self.state.can_stop_between_steps:
            say(f"{IN_LOOP}; {ONCE_MORE}")
        else:
            if self.state.loop is not None:
                say("the run has no `directory`, so nothing of it is on the disk")
            return False
        # Before the wish that it explains.
        self._control.head.end = signum
        self._apply(recovery.stop_wanted(self.state))
        return True

    def written(self) -> None:
        """Continue after a checkpoint has been written."""
        if self._is_writing:
            self._is_writing = False
            self._answer_writer(self._to_write.pop(0)[1])
        self._write_next()
        if self._is_ending and not self._is_writing:
            self._job.end()

    def write_last(self) -> None:
        """Write the newest snapshot if the run has a directory, and wait until it is written."""
        self._writer.wait()
        kept = self._newest_snapshot()
        mapping = None if kept is None else self._memories.mapping(kept.places.key)
        if kept is None or mapping is None or not self._may_write(kept):
            return
        self._writer.begin(mapping, kept)
        self._writer.wait()

    def write_meanwhile(self) -> None:
        """Write the newest snapshot while an ending job finishes its step, unless it is written.

        The sender of the signal may kill the job before that step ends. Until then no older
        checkpoint is removed to make room: another host may not have this one.
        """
        kept = None
        with contextlib.suppress(ValueError):  # a new snapshot is overwriting it
            kept = self._newest_snapshot()
        is_over = self._is_ending or self._has_stopped_recovery
        if kept is not None and not is_over and self._may_write(kept):
            self._to_write.append((replace(kept, keep=kept.keep + 1), None, False))
            self._write_next()

    def close(self, is_enough: Callable[[], bool]) -> None:
        """Release everything; wait for copies to a URL until `is_enough` returns True."""
        self._writer.wait()
        if self._is_ending and self._writer.newest:
            say(self._writer.newest)
        if not_saved := self._writer.not_saved:
            say(not_saved)
            self.is_saved = False
        self._memories.close()
        self._writer.close(is_enough)

    def stop_recovery(self) -> None:
        """Ignore further joins and continuations: the job ends."""
        self._has_stopped_recovery = True

    def _apply(self, decision: recovery.RecoveryDecision) -> None:
        if not self._has_stopped_recovery:
            self._do(decision)

    def _do(self, decision: recovery.RecoveryDecision) -> None:
        self.state = decision.state
        for action in decision.actions:
            self._act(action)

    def _act(self, action: recovery.Action) -> None:
        match action:
            case recovery.Seat(rank, arrivals):
                self._control.mark_replaced(rank, arrivals)
            case recovery.MarkDeparture(rank, how):
                self._control.leave(rank, how)
            case recovery.Spawn(rank):
                self._job.spawn(rank)
            case recovery.StartAgain(rank):
                self._job.start_again(rank)
            case recovery.Answer(rank, message):
                if isinstance(message, messages.Live) and message.loop is not None:
                    number = self._number_of_snapshot(message.loop)
                    message = replace(message, snapshot=number)
                    if not number and self.state.first_rank is None:
                        message = replace(message, loop=None)  # it begins again
                self._job.send(rank, message)
            case recovery.Wish(value):
                self._control.head.wish = value
            case recovery.Joined(ranks):
                pids = {rank: self._control.lines[rank].process[0] for rank in ranks}
                say(joined_message(pids, self.state))
            case recovery.KeepAndEnd():
                self._is_ending = True
                kept = self._newest_snapshot()
                if kept is not None and self.state.first_rank is None:  # else workers have asked
                    self._to_write.append((kept, None, False))
                    self._write_next()
                if not self._is_writing:
                    self._job.end()

    def _detach(self, rank: int) -> None:
        """Stop answering a worker; still write the snapshots that it requested."""
        self._to_write = [
            (kept, None if asker == rank else asker, waits) for kept, asker, waits in self._to_write
        ]

    def _locked(self, directory: Path, remote: Mapping[str, Any] | None) -> messages.ToWorker:
        try:
            self._writer.lock(directory, remote)
        except CheckpointError as error:
            return messages.Refused(str(error), type(error))
        except OSError as error:
            return messages.Refused(str(error), CheckpointError)
        return messages.Acknowledged()

    def _memory(self, rank: int, key: int, num_bytes: int) -> messages.ToWorker:
        try:
            return messages.MemoryGranted((self._memories.request(rank, key, num_bytes),))
        except ValueError as error:
            return messages.Refused(str(error))
        except OSError as error:
            return messages.Refused(str(error), OSError)

    def _write_next(self) -> None:
        if self._is_writing or not self._to_write:
            return
        kept, rank, waits = self._to_write[0]
        mapping = self._memories.mapping(kept.places.key)
        if mapping is None:
            say(f"step {kept.step}: no checkpoint: its memory is gone.")
            self._answer_writer(self._to_write.pop(0)[1])
            return
        self._is_writing = True
        self._writer.begin(mapping, kept, self._wake)
        if not waits:
            self._to_write[0] = (kept, None, False)
            self._answer_writer(rank)

    def _answer_writer(self, rank: int | None) -> None:
        if rank is not None:
            self._job.send(rank, messages.Acknowledged())

    def _newest_snapshot(self) -> SlotToWrite | None:
        loop = self.state.loop.facts if self.state.loop is not None else None
        if loop is None and self.state.history:
            loop = self.state.history[-1].loop
        if loop is None or not loop.get("directory"):
            return None
        mapping = self._memories.mapping(loop["key"])
        return None if mapping is None else newest_to_write(mapping, loop)

    def _may_write(self, kept: SlotToWrite) -> bool:
        try:
            if self.state.first_rank is not None:
                self._writer.locks.acquire(Path(kept.directory))
        except CheckpointError:  # another host has locked it, and writes
            return False
        return True

    def _number_of_snapshot(self, loop: Mapping[str, Any]) -> int:
        """Return the number of the newest complete snapshot of a loop; 0 if its memory is gone."""
        mapping = self._memories.mapping(loop["key"])
        if mapping is None:
            return 0
        return max(Places.from_json(dict(loop)).marks(lambda at, count: mapping[at : at + count]))

    def _tidy_memories(self) -> None:
        """Release unneeded memory: of loops that have ended, all but the newest snapshots."""
        busy = [item[0].places.key for item in self._to_write]
        busy += [self.state.loop.facts["key"]] if self.state.loop is not None else []
        ended = {
            entry.loop["key"]: Places.from_json(dict(entry.loop))
            for entry in self.state.history
            if entry.loop is not None
        }
        self._memories.drop_unused({*busy, *ended})
        rest = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _ENDED_PARTS_OF_MEMORY
        for number, key in enumerate(reversed(ended)):
            if key not in busy:
                rest -= self._memories.shrink(key, ended[key])
                if rest < 0 or number >= _ENDED_LOOPS_AT_MOST:
                    self._memories.move_to_disk(key, ended[key])
