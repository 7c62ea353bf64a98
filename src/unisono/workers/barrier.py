"""Where the workers of a step meet, and what follows when one of them is lost.

A wait (see ``meeting_point``) ends when everyone has come, when one of those missing was lost (then
the membership changes), when one has left for good or died with nobody to make up for it
(:class:`PeerLostError`), or when the time is up (:class:`WaitTimeoutError`).

Whether a lost worker had come to a meeting is a fact that never changes again, so all others
decide alike: those who wait for it stop at the same meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.errors import MismatchError, PeerLostError, WaitTimeoutError
from unisono.notices import say
from unisono.timeouts import MEETING
from unisono.workers.control_block import PURPOSE_BYTES, ControlBlock
from unisono.workers.meeting_point import COUNTER, Departure, spin_s

_SAME_CALLS = "all workers must make the same calls in the same order."


class Barrier:
    """One worker's view of the meeting point. Every rank makes one; final.

    Args:
        control: the control block shared with the other workers.
        rank: this worker.
        timeout_s: how long a wait may last, in seconds; see :mod:`unisono.timeouts`.
        notice_after_s: when a wait is told in words, in seconds; the same.
        say: where those words go.
        look: called several times a second while somebody is missing; marks on the control block
            who has died. By default nothing: a launcher does that.
    """

    def __init__(
        self,
        control: ControlBlock,
        rank: int,
        *,
        timeout_s: float | None = None,
        notice_after_s: float | None = None,
        say: Callable[[str], None] = say,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._control = control
        self._rank, self._line = rank, control.lines[rank]
        self._timeout_s = MEETING.in_s() if timeout_s is None else timeout_s
        self._say = say
        self._look = look
        self._point = control.meeting_point(rank, self, notice_after_s)
        self.set_membership(range(control.world_size))

    def set_membership(self, ranks: Sequence[int]) -> None:
        """Wait for these ranks from now on."""
        self._others = [other for other in ranks if other != self._rank]
        self._point.spin_s = spin_s(len(ranks))

    def departure(self, other: int) -> Departure:
        """Look whether `other` has left, also without a word."""
        self._look()
        return self._control.departure(other)

    def has_gone_further(self, other: int) -> bool:
        """Tell whether a worker has come to the meeting that this one comes to next."""
        return not self._point.missing([other], (self.arrivals + 1) % COUNTER)

    @property
    def arrivals(self) -> int:
        """Count the meetings that this worker has come to, modulo 2³²."""
        return int(self._line.arrivals)

    def arrive(self, purpose: str = "") -> None:
        """Come to the next meeting. Collective: every rank calls it, in the same order.

        Args:
            purpose: what the meeting is for, in at most 24 letters; the same on every rank.
        """
        self._line.purposes[(self.arrivals + 1) % 2].value = purpose.encode()[:PURPOSE_BYTES]
        self._point.arrive()

    def vote(self, vote: int) -> None:
        """Have a number, below 2³², read beside the next arrival of this worker."""
        self._line.votes[(self.arrivals + 1) % 2] = vote

    def votes(self, ranks: Sequence[int]) -> dict[int, int]:
        """Read what came with the arrivals that :meth:`wait` has waited for, by rank."""
        which = self.arrivals % 2
        return {rank: self._control.lines[rank].votes[which] for rank in ranks}

    def wait(self) -> bool:
        """Wait until the others have come to the meeting that this worker came to last.

        Returns:
            Whether all have come; False if one that has not was lost.

        Raises:
            MismatchError: somebody came for another purpose.
            PeerLostError: a worker that has not come never will.
            WaitTimeoutError: a worker did not come in time.
        """
        target = self.arrivals
        if not self._point.wait(self._others, target, self._timeout_s):
            return False
        self._check_purpose(target % 2)
        return True

    def look(self, missing: Sequence[int]) -> list[tuple[int, Departure]]:
        """See :class:`~unisono.workers.meeting_point.Waiter`."""
        self._look()
        left = [(rank, self._control.departure(rank)) for rank in missing]
        return [one for one in left if one[1] != Departure.PRESENT]

    def lose(self, rank: int, how: Departure) -> None:
        """See :class:`~unisono.workers.meeting_point.Waiter`; a lost one is made up for."""
        if not how.may_be_back:
            raise self._left(rank, how)

    def give_up_on(self, missing: Sequence[int], waited_s: float) -> WaitTimeoutError:
        """See :class:`~unisono.workers.meeting_point.Waiter`."""
        return WaitTimeoutError(
            f"{self._sight(missing, waited_s)} Giving up after {waited_s:.0f} s: look at what rank "
            f"{missing[0]} does there, or at code that not every worker runs.",
            missing=tuple(missing),
            waited_s=waited_s,
        )

    def tell(self, missing: Sequence[int], waited_s: float, *, is_long: bool) -> None:
        """See :class:`~unisono.workers.meeting_point.Waiter`; the first of those here speaks."""
        here = min(set(self._others) - set(missing), default=self._rank + 1)
        if is_long and self._rank < here:
            self._say(self._sight(missing, waited_s))

    def _check_purpose(self, which: int) -> None:
        mine = self._line.purposes[which].value
        for other in self._others:
            theirs = self._control.lines[other].purposes[which].value
            if theirs != mine:
                raise MismatchError(
                    f"every worker must make the same calls in the same order, but rank "
                    f"{self._rank} came to `{mine.decode().strip()}` and rank {other} to "
                    f"`{theirs.decode().strip()}`: call it on every worker, not under "
                    f"`if rank == 0` nor where only one caught an exception."
                )

    def _sight(self, missing: Sequence[int], waited_s: float) -> str:
        here = self._line.step
        there = ", ".join(f"rank {other} ({self._last_seen(other)})" for other in missing)
        return f"rank {self._rank} in step {here} has waited {waited_s:.0f} s for {there}."

    def _left(self, other: int, how: Departure) -> PeerLostError:
        what, advice = {
            Departure.FINISHED: ("has finished its program", _SAME_CALLS),
            Departure.DIED: (
                f"has died, its process {self._control.lines[other].pid} is gone",
                "look for what ended it (a signal, too little memory), and start all again; with a "
                "`directory` the run goes on from its newest checkpoint.",
            ),
            Departure.UNREACHABLE: (
                "cannot be reached any more",
                "its host has gone, or the link to it; see to that and start all again; with a "
                "`directory` the run goes on from its newest checkpoint.",
            ),
        }.get(how, ("has failed", _SAME_CALLS))
        return PeerLostError(
            f"every worker must come to this point of step {self._line.step}, "
            f"but rank {other} {what} ({self._last_seen(other)}) while rank {self._rank} waits for "
            f"it: {advice}",
            rank=other,
        )

    def _last_seen(self, other: int) -> str:
        return f"last seen in step {self._control.lines[other].step}"
