"""Who sees that a worker has died, if our launcher does not? Everyone who waits for it.

Each worker's process is watched through a pidfd. It is opened when that process has taken its seat,
and only believed if the process is still the one that did, so it never means a later process with
the same number. A process that has died is marked as such on the control block.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from unisono.workers.control_block import ControlBlock, Departure
from unisono.workers.proc import started_at


class ProcessWatch:
    """The processes of the other workers as one of them sees them. Final.

    Args:
        control: the control block on which they have said who they are.
        rank: this worker.
        ranks: those on this host; None: all.
    """

    def __init__(
        self, control: ControlBlock, rank: int, ranks: Sequence[int] | None = None
    ) -> None:
        self._control = control
        ranks = range(control.world_size) if ranks is None else ranks
        self._unseen = [other for other in ranks if other != rank]
        self._pidfds: dict[int, int] = {}

    def look(self) -> None:
        """Mark those who have died; begin to watch those who have come."""
        for other in list(self._unseen):
            pid, started = self._control.process(other)
            if not pid:
                continue
            # Where that fails (no more descriptors, say), it is looked at by number, every time.
            with contextlib.suppress(OSError):
                self._pidfds[other] = os.pidfd_open(pid)
            is_gone = started_at(pid) != started
            if is_gone or other in self._pidfds:
                self._unseen.remove(other)
            if is_gone:
                self._mark(other)
        for other, pidfd in list(self._pidfds.items()):
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if poll.poll(0):
                self._mark(other)

    def close(self) -> None:
        """Stop watching."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def _mark(self, other: int) -> None:
        pidfd = self._pidfds.pop(other, None)
        if pidfd is not None:
            os.close(pidfd)
        if self._control.departure(other) == Departure.PRESENT:
            self._control.leave(other, Departure.DIED)
