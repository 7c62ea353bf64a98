"""Where the ranks of a group meet: none goes on before all have come for the same call.

A call has one meeting or more. Before the first, each rank posts its call; after it, all compare.
A wait spins for a moment (the others are usually microseconds away), then sleeps in the kernel,
and wakes at least five times a second to see whether a rank died. A long wait is reported once.
Only the rank itself writes its counter, adding to it inside the kernel, which orders memory on
every processor (see ``futex``).

Each rank alternates between two posts. That is enough: none posts the next but one call before
all have come to the next one, and so have compared this one.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Sequence
from contextlib import closing

from unisono.c10d.calls import encode
from unisono.c10d.group_memory import ARRIVALS, CALLS, POST_TEXT_BYTES, GroupMemory
from unisono.c10d.peers import Peers, RankExit
from unisono.errors import MismatchError, PeerLostError, WaitTimeoutError
from unisono.notices import say
from unisono.workers.barrier import NOTICE_AFTER_S
from unisono.workers.context import context
from unisono.workers.waiting import ShownWait

NO_NOTE = -1
SLEEP_AT_MOST_S = 0.2
_SPIN_S = 3e-3
_SPIN_WHEN_CROWDED_S = 2e-5
_COUNTER = 2**32
_NOTE = struct.Struct("<q")


def spin_s(names: Sequence[int]) -> float:
    """Return how long to spin before sleeping: shortly where processes outnumber the cores.

    There are at least as many processes as the greatest of the global ranks `names` says.
    """
    is_crowded = max(names) + 1 > len(os.sched_getaffinity(0))
    return _SPIN_WHEN_CROWDED_S if is_crowded else _SPIN_S


class Meeting:
    """One rank's view of the meeting point. Final.

    Args:
        region: the group's memory.
        peers: the processes of the others.
        timeout_s: how long a wait may last unless the call says otherwise.
    """

    def __init__(self, region: GroupMemory, peers: Peers, timeout_s: float) -> None:
        self._region = region
        self._peers = peers
        self.rank = peers.rank
        self.names = peers.names
        self.num_ranks = len(peers.names)
        self._others = [other for other in range(self.num_ranks) if other != self.rank]
        lines = [region.layout.line(rank) for rank in range(self.num_ranks)]
        self._lines = lines
        self._arrivals_at = [(line + ARRIVALS) // 4 for line in lines]
        self.timeout_s = timeout_s
        self._timeout_s = timeout_s
        self._spin_s = spin_s(self.names)
        self.num_met = 0
        self._num_calls = 0
        self._note = NO_NOTE
        self._post = b""
        self._is_compared = True
        self.is_ahead = False  # whether we have come to a meeting that we have not waited for
        self._all_posts_are_equal = True
        self._ended = ""

    def announce(self, call: bytes, note: int = NO_NOTE, timeout_s: float | None = None) -> None:
        """Post the call that the next meeting begins; this rank must not be ahead.

        Args:
            call: what :func:`~unisono.c10d.calls.encode` returned.
            note: a number that may differ between ranks, for :meth:`notes`.
            timeout_s: how long each wait of this call may last.

        Raises:
            PeerLostError: the group has ended.
        """
        self._check_usable()
        self._num_calls += 1
        self._note = note
        self._post = _NOTE.pack(note) + call + b"\0"
        start = self._region.layout.post(self.rank, self._num_calls)
        self._region.mapping[start : start + len(self._post)] = self._post
        self._region.set_word(self._lines[self.rank] + CALLS, self._num_calls % _COUNTER)
        self._is_compared = False
        self._timeout_s = self.timeout_s if timeout_s is None else timeout_s

    def meet(self) -> None:
        """Arrive and wait. Collective: every rank calls it, in the same order."""
        self.arrive()
        self.wait()

    def arrive(self) -> None:
        """Come, without waiting yet: the others may read what this rank has shown."""
        self.num_met = (self.num_met + 1) % _COUNTER
        self._region.add_and_wake(self._lines[self.rank] + ARRIVALS)
        self.is_ahead = True

    def wait(self, patience_s: float = math.inf, *, spins: bool = True) -> bool:
        """Wait until all have come where this rank has, and compare calls.

        Args:
            patience_s: how long at most; then it may be called again.
            spins: spin for a moment before sleeping.

        Returns:
            Whether all have come.

        Raises:
            MismatchError: a rank came with another call; all learn it here.
            PeerLostError: a rank that has not come never will.
            WaitTimeoutError: a rank did not come in time.
        """
        if not self._wait(patience_s, self._spin_s if spins else 0.0):
            return False
        if not self._is_compared:
            self._is_compared = True
            self._compare()
        return True

    def refuse(self) -> None:
        """Come to a meeting only to say that this rank's arguments are wrong.

        Returns at once; the others find a mismatch when they come.
        """
        if not self._ended:
            self.announce(encode("a call with wrong arguments"))
            self._is_compared = True
            self.arrive()

    def notes(self) -> list[int]:
        """Return each rank's note to this call; known after the first meeting."""
        if self._all_posts_are_equal:
            return [self._note] * self.num_ranks
        starts = [self._region.layout.post(rank, self._num_calls) for rank in range(self.num_ranks)]
        return [int(_NOTE.unpack_from(self._region.mapping, start)[0]) for start in starts]

    def give_up(self, reason: str) -> None:
        """End the group: this rank cannot go on with it, and the others learn why."""
        self._end(RankExit.GAVE_UP, reason, f"a call failed half-way: {reason}")

    def leave(self) -> None:
        """End the group for this rank, in order."""
        self._end(RankExit.LEFT, "", "it was destroyed.")

    def _end(self, how: RankExit, reason: str, ended: str) -> None:
        if not self._ended:
            self._ended = ended
            self._peers.leave(how, reason)

    def _check_usable(self) -> None:
        if self._ended:
            raise PeerLostError(
                f"a process group must not be used after its end, but this one has ended, as "
                f"{self._ended} Make a new one.",
                rank=self.names[self.rank],
            )

    def _wait(self, patience_s: float, spin_s: float) -> bool:
        target = self.num_met
        missing = self._missing(self._others, target)
        if missing:
            end = time.perf_counter() + spin_s
            while missing and time.perf_counter() < end:
                os.sched_yield()
                missing = self._missing(missing, target)
            if missing and not self._sleep(missing, target, patience_s):
                return False
        self._region.acquire(self._lines[self.rank] + ARRIVALS)
        self.is_ahead = False
        return True

    def _missing(self, ranks: list[int], target: int) -> list[int]:
        words, at = self._region.words, self._arrivals_at
        return [r for r in ranks if (words[at[r]] - target) % _COUNTER >= _COUNTER // 2]

    def _sleep(self, missing: list[int], target: int, patience_s: float) -> bool:
        start = time.monotonic()
        has_said = False
        with closing(ShownWait()) as shown:
            while missing:
                other = missing[0]
                seen = self._region.words[self._arrivals_at[other]]
                self._check_usable()  # another thread may have aborted the group
                self._peers.watch()
                lost = self._peers.first_lost(missing)  # before the next look at who has come
                missing = self._missing(missing, target)
                if lost and lost[0] in missing:
                    raise self._lost(*lost)
                if other not in missing:
                    continue
                waited_s = time.monotonic() - start
                if waited_s >= self._timeout_s:
                    raise self._late(missing, waited_s)
                if waited_s >= patience_s:
                    return False
                if waited_s >= NOTICE_AFTER_S and not has_said:
                    has_said = True
                    self._say_who_is_late(missing, waited_s)
                shown.look(waited_s, self._here)
                slice_s = min(SLEEP_AT_MOST_S, self._timeout_s - waited_s, patience_s - waited_s)
                self._region.sleep_while(self._lines[other] + ARRIVALS, seen, slice_s)
        return True

    def _say_who_is_late(self, missing: list[int], waited_s: float) -> None:
        """Say it on one rank, the first of those that have come, if no launcher does."""
        if context().supervisor.explains_waits:
            return
        if self.rank < min(set(self._others) - set(missing), default=self.rank + 1):
            sight = self._sight(missing, f"has waited {waited_s:.0f} s")
            say(f"in {self._here()} {sight}.")

    def _compare(self) -> None:
        """Compare all posts of this call with ours; the notes in them may differ."""
        post, mapping = self._post, self._region.mapping
        self._all_posts_are_equal = True
        for other in self._others:
            start = self._region.layout.post(other, self._num_calls)
            theirs = mapping[start : start + len(post)]
            if theirs != post:
                self._all_posts_are_equal = False
                if theirs[_NOTE.size :] != post[_NOTE.size :]:
                    raise self._mismatch(other)

    def _call_of(self, rank: int, num_calls: int) -> str:
        start = self._region.layout.post(rank, num_calls) + _NOTE.size
        text = self._region.memory.read(start, POST_TEXT_BYTES)
        return text.partition(b"\0")[0].decode(errors="replace")

    def _mismatch(self, other: int) -> MismatchError:
        rank, number, names = self.rank, self._num_calls, self.names
        return MismatchError(
            f"every rank must make the same calls in the same order, but in call {number} rank "
            f"{names[rank]} came to {self._call_of(rank, number)} and rank {names[other]} to "
            f"{self._call_of(other, number)}: look for code that not every rank runs, or for "
            f"tensors whose dtype or size differs."
        )

    def _lost(self, other: int, why: str) -> PeerLostError:
        names = self.names
        return PeerLostError(
            f"every rank must come to {self._here()}, but rank {names[other]} never will, since "
            f"{why} ({self._last_seen(other)}).",
            rank=names[other],
        )

    def _late(self, missing: list[int], waited_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"every rank must come to {self._here()}, but after {waited_s:.1f} s "
            f"{self._sight(missing, 'still waits')}: look at what it does there, for code that not "
            f"every rank runs, or for groups whose calls ranks wait for in another order.",
            missing=tuple(self.names[rank] for rank in missing),
            waited_s=waited_s,
        )

    def _sight(self, missing: Sequence[int], does: str) -> str:
        names = self.names
        there = " and ".join(f"rank {names[r]} ({self._last_seen(r)})" for r in missing)
        return f"rank {names[self.rank]} {does} for {there}"

    def _here(self) -> str:
        return f"{self._call_of(self.rank, self._num_calls)} (call {self._num_calls})"

    def _last_seen(self, other: int) -> str:
        number = self._region.word(self._lines[other] + CALLS)
        if not number:
            return "never seen"
        return f"last seen in {self._call_of(other, number)}, call {number}"
