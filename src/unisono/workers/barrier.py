"""Where workers meet: nobody goes on before everybody has come, and nobody waits for ever.

A wait spins for a moment (the others are usually microseconds away), then sleeps in the kernel.
It ends when everyone has come, when one of those missing was lost (then the membership changes),
when one has left for good or died with nobody to make up for it (:class:`PeerLostError`), or when
the time is up (:class:`WaitTimeoutError`). Somebody who waits long says so in words.

Whether a lost worker had come to a meeting is a fact that never changes again, so all others
decide alike: those who wait for it stop at the same meeting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from unisono.errors import MismatchError, PeerLostError, WaitTimeoutError
from unisono.notices import say
from unisono.workers.control_block import ControlBlock, Departure

TIMEOUT_S = 1800.0
NOTICE_AFTER_S = 10.0
_SPIN_S = 3e-3
_SPIN_WHEN_CROWDED_S = 2e-5
_SLEEP_AT_MOST_S = 0.2
_COUNTER = 2**32
_SAME_CALLS = "all workers must make the same calls in the same order."


class Barrier:
    """One worker's view of the meeting point. Every rank makes one; final.

    Args:
        control: the control block shared with the other workers.
        rank: this worker.
        timeout_s: how long a wait may last, in seconds.
        notice_after_s: when a wait is told in words, in seconds.
        say: where those words go.
        look: called several times a second while somebody is missing; marks on the control block
            who has died. By default nothing: a launcher does that.
        spins: whether others are near enough to wait for them without sleeping.
    """

    def __init__(
        self,
        control: ControlBlock,
        rank: int,
        *,
        timeout_s: float = TIMEOUT_S,
        notice_after_s: float = NOTICE_AFTER_S,
        say: Callable[[str], None] = say,
        look: Callable[[], None] = lambda: None,
        spins: bool = True,
    ) -> None:
        self._control = control
        self._rank = rank
        self._timeout_s = timeout_s
        self._notice_after_s = notice_after_s
        self._say = say
        self._look, self._spins = look, spins
        self.set_membership(range(control.world_size))

    def set_membership(self, ranks: Sequence[int]) -> None:
        """Wait for these ranks from now on."""
        self._others = [other for other in ranks if other != self._rank]
        crowded = len(ranks) > len(os.sched_getaffinity(0))
        self._spin_s = (_SPIN_WHEN_CROWDED_S if crowded else _SPIN_S) if self._spins else 0.0

    def departure(self, other: int) -> Departure:
        """Look whether `other` has left, also without a word."""
        self._look()
        return self._control.departure(other)

    def has_gone_further(self, other: int) -> bool:
        """Tell whether a worker has come to the meeting that this one comes to next."""
        return self._has_come(other, (self.arrivals + 1) % _COUNTER)

    @property
    def arrivals(self) -> int:
        """Count the meetings that this worker has come to, modulo 2³²."""
        return int(self._control.lines[self._rank].arrivals)

    def arrive(self, purpose: str = "") -> None:
        """Come to the next meeting. Collective: every rank calls it, in the same order.

        Args:
            purpose: what the meeting is for, in at most 24 letters; the same on every rank.
        """
        target = (self.arrivals + 1) % _COUNTER
        self._control.set_purpose(self._rank, target % 2, purpose.encode())
        self._control.arrive(self._rank)

    def vote(self, vote: int) -> None:
        """Have a number, below 2³², read beside the next arrival of this worker."""
        self._control.set_vote(self._rank, (self.arrivals + 1) % 2, vote)

    def votes(self, ranks: Sequence[int]) -> dict[int, int]:
        """Read what came with the arrivals that :meth:`wait` has waited for, by rank."""
        which = self.arrivals % 2
        return {rank: self._control.vote(rank, which) for rank in ranks}

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
        missing = [other for other in self._others if not self._has_come(other, target)]
        if missing:
            missing = self._spin(missing, target)
        if missing and not self._sleep(missing, target):
            return False
        self._control.acquire(self._rank)
        self._check_purpose(target % 2)
        return True

    def _check_purpose(self, which: int) -> None:
        mine = self._control.purpose(self._rank, which)
        for other in self._others:
            theirs = self._control.purpose(other, which)
            if theirs != mine:
                raise MismatchError(
                    f"every worker must make the same calls in the same order, but rank "
                    f"{self._rank} came to `{mine.decode().strip()}` and rank {other} to "
                    f"`{theirs.decode().strip()}`: call it on every worker, not under "
                    f"`if rank == 0` nor where only one caught an exception."
                )

    def _has_come(self, other: int, target: int) -> bool:
        arrivals: int = self._control.lines[other].arrivals
        return (arrivals - target) % _COUNTER < _COUNTER // 2

    def _spin(self, missing: list[int], target: int) -> list[int]:
        end = time.perf_counter() + self._spin_s
        while missing and time.perf_counter() < end:
            os.sched_yield()
            missing = [other for other in missing if not self._has_come(other, target)]
        return missing

    def _sleep(self, missing: list[int], target: int) -> bool:
        """Wait for `missing`; False if one of them was lost."""
        control = self._control
        start = time.monotonic()
        told = False
        while missing:
            other = missing[0]
            seen = control.lines[other].arrivals
            self._look()
            left = [(rank, control.departure(rank)) for rank in missing]
            missing = [rank for rank in missing if not self._has_come(rank, target)]
            for rank, how in left:
                if rank in missing and how == Departure.LOST:
                    return False
                if rank in missing and how != Departure.PRESENT:
                    raise self._left(rank, how)
            if other not in missing:
                continue
            waited_s = time.monotonic() - start
            if waited_s >= self._timeout_s:
                raise WaitTimeoutError(
                    f"{self._sight(missing, waited_s)} Giving up after {waited_s:.0f} s: look "
                    f"at what rank {other} does there, or at code that not every worker runs.",
                    missing=tuple(missing),
                    waited_s=waited_s,
                )
            if waited_s >= self._notice_after_s and not told:
                told = True
                if self._rank < min(set(self._others) - set(missing), default=self._rank + 1):
                    self._say(self._sight(missing, waited_s))
            control.sleep_until_arrival(other, seen, min(_SLEEP_AT_MOST_S, self._timeout_s))
        return True

    def _sight(self, missing: list[int], waited_s: float) -> str:
        here = self._control.lines[self._rank].step
        there = ", ".join(f"rank {other} ({self._last_seen(other)})" for other in missing)
        return f"rank {self._rank} in step {here} has waited {waited_s:.0f} s for {there}."

    def _left(self, other: int, how: Departure) -> PeerLostError:
        what, advice = {
            Departure.FINISHED: ("has finished its program", _SAME_CALLS),
            Departure.DIED: (
                f"has died, its process {self._control.process(other)[0]} is gone",
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
            f"every worker must come to this point of step {self._control.lines[self._rank].step}, "
            f"but rank {other} {what} ({self._last_seen(other)}) while rank {self._rank} waits for "
            f"it: {advice}",
            rank=other,
        )

    def _last_seen(self, other: int) -> str:
        return f"last seen in step {self._control.lines[other].step}"
