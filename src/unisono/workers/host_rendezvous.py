"""How do workers of another launcher find each other? Through an announcement of rank 0.

::

    rank 0   creates the control block ─ announces it in the private folder ─ … ─ removes that
    rank 1     reads the announcement ─ opens the control block through /proc ─ takes its seat ─ …
                                                 all seats are taken: the team is complete

No port, no store, and afterwards nothing that has a name. An announcement may be left over from an
earlier job of the same name: then nobody holds it, or it does not lead to that job's control block,
or the seat there is taken. In each case the worker keeps looking for a limited time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from unisono.errors import PeerLostError, RendezvousError, WaitTimeoutError
from unisono.notices import say
from unisono.workers import codec
from unisono.workers.control_block import (
    MEMORY_NAME,
    TOKEN_BYTES,
    ControlBlock,
    Departure,
    control_block_bytes,
)
from unisono.workers.jobname import JobName
from unisono.workers.private import PrivateFolder, locked
from unisono.workers.proc import NotThereError, host_name, open_memory, started_at
from unisono.workers.process_watch import ProcessWatch
from unisono.world import World

TIMEOUT_S = 300.0
NOTICE_AFTER_S = 10.0
_LOOK_EVERY_S = 0.01
_TAKEN_AT_MOST_S = 3.0


@dataclass(frozen=True, slots=True)
class ControlBlockAddress:
    """Where rank 0 has the control block, as it announces it."""

    pid: int
    fd: int
    token: str
    host: str


class HostRendezvous:
    """Where the workers of one job wait until all are there. Final.

    Args:
        job: the job's name.
        here: this worker's place.
        folder: where rank 0 announces itself.
        timeout_s: how long the last one may take, in seconds.
        say: prints who is missing.
    """

    def __init__(
        self,
        job: JobName,
        here: World,
        folder: PrivateFolder,
        *,
        timeout_s: float = TIMEOUT_S,
        say: Callable[[str], None] = say,
    ) -> None:
        self._job, self._here, self._folder, self._say = job, here, folder, say
        self._timeout_s = timeout_s
        self._begun_s = time.monotonic()
        self._is_told = False

    def enter(self) -> tuple[ControlBlock, ProcessWatch]:
        """Take this worker's seat, and wait for the others. Collective: every rank calls it once.

        Returns:
            The control block that all share, and what watches over them. All have come.

        Raises:
            RendezvousError: the seat is taken, or the others cannot be reached from here.
            WaitTimeoutError: somebody did not come in time.
            PeerLostError: somebody came and left before all were there.
        """
        if self._here.rank:
            return self._await_all(self._find())
        control = ControlBlock.create(self._here.world_size)
        token = os.urandom(TOKEN_BYTES)
        control.head.token[:] = token
        control.take_seat(0)
        entry = ControlBlockAddress(os.getpid(), control.fd, token.hex(), host_name())
        held = self._folder.leave(self._job.name, codec.encode(entry))
        if held is None:
            control.close()
            raise self._taken(0)
        try:
            return self._await_all(control)
        finally:
            self._folder.take_back(self._job.name, held)

    def _find(self) -> ControlBlock:
        """Look for this job's control block and take this worker's seat."""
        rank = self._here.rank
        taken_s = None
        while True:
            reason = "has left no word"
            word = self._folder.read(self._job.name)
            try:
                if word is not None:
                    control = self._open(word.text, is_held=word.is_held)
                    if control is not None:
                        return control
                    taken_s = time.monotonic() if taken_s is None else taken_s
                    if time.monotonic() - taken_s >= _TAKEN_AT_MOST_S:
                        raise self._taken(rank)
                    reason = f"has left word, but somebody has the seat of rank {rank} there"
            except NotThereError as error:
                reason = f"has not left word for this start: {error}"
            self._wait((0,), reason)

    def _open(self, text: str, *, is_held: bool) -> ControlBlock | None:
        """Take this worker's seat where an announcement leads to; None if it is taken.

        Raises:
            NotThereError: it leads nowhere.
            RendezvousError: it leads to where this process cannot go.
        """
        try:
            entry = codec.decode(ControlBlockAddress, text)
        except ValueError as error:
            raise NotThereError(str(error)) from error
        if not is_held:
            raise NotThereError("the word there is a left-over of an earlier one")
        if entry.host != host_name():
            raise RendezvousError(
                f"all workers of a job must be on one host and in one container, but rank 0 is in "
                f"another one than rank {self._here.rank}: several hosts are not supported yet. "
                f"Start all workers in the same container."
            )
        size = control_block_bytes(self._here.world_size)
        fd = open_memory(entry.pid, entry.fd, MEMORY_NAME, size)
        control = ControlBlock(fd, self._here.world_size)
        if bytes(control.head.token).hex() != entry.token:
            control.close()
            raise NotThereError("the control block there is another one's")
        with locked(fd, f"the control block of the job ({self._job.told})"):
            pid, started = control.process(self._here.rank)
            if not pid:
                control.take_seat(self._here.rank)
                return control
        control.close()
        if started_at(pid) != started:
            raise NotThereError(f"an earlier rank {self._here.rank} has died there")
        return None

    def _await_all(self, control: ControlBlock) -> tuple[ControlBlock, ProcessWatch]:
        here, ranks = self._here, range(self._here.world_size)
        watch = ProcessWatch(control, here.rank)
        try:
            while True:
                watch.look()
                missing = tuple(rank for rank in ranks if not control.process(rank)[0])
                if not missing:
                    # Everybody has mapped it: nobody needs to find it any more.
                    control.close()
                    return control, watch
                for rank in ranks:
                    if control.departure(rank) != Departure.PRESENT:
                        raise self._left(rank)
                self._wait(missing, "", is_first=here.rank == min(set(ranks) - set(missing)))
        except BaseException:
            control.leave(here.rank, Departure.FAILED)
            watch.close()
            control.close()
            raise

    def _wait(self, missing: tuple[int, ...], reason: str, *, is_first: bool = True) -> None:
        """Let a moment pass while some are missing.

        Raises:
            WaitTimeoutError: there was no moment left.
        """
        waited_s = time.monotonic() - self._begun_s
        others = " and ".join(f"rank {rank}" for rank in missing)
        sight = (
            f"rank {self._here.rank} of {self._here.world_size} (started by "
            f"{self._here.started_by}, {self._job.told}) has waited {waited_s:.0f} s for {others}"
        )
        if waited_s >= self._timeout_s:
            why = f", which {reason}" if reason else ""
            raise WaitTimeoutError(
                f"all workers of a job must come to the first `Trainer`, `Run` or `unisono.init`, "
                f"but {sight}{why}. Look whether it was started, with the same variables, on this "
                f"host, and finds the same folder ({self._folder.path}; XDG_RUNTIME_DIR says "
                f"where); UNISONO_MEETING_TIMEOUT=600 waits longer (s).",
                missing=missing,
                waited_s=waited_s,
            )
        if waited_s >= NOTICE_AFTER_S and not self._is_told:
            self._is_told = True
            if is_first:
                self._say(f"{sight}.")
        time.sleep(_LOOK_EVERY_S)

    def _left(self, rank: int) -> PeerLostError:
        return PeerLostError(
            f"all workers of a job must stay until all have come, but rank {rank} has ended "
            f"before: look at what it has said.",
            rank=rank,
        )

    def _taken(self, rank: int) -> RendezvousError:
        return RendezvousError(
            f"each worker of a job must have a rank of its own, but another process has come as "
            f"rank {rank} of {self._here.world_size} ({self._job.told}): give every process its "
            f"own RANK, and jobs that run at the same time another MASTER_PORT; what a worker "
            f"starts must not train in its place."
        )
