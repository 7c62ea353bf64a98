"""All workers of a run, as one of them sees it: they synchronize, exchange bytes, share memory.

A process that was not started as a worker is a team of one, and waits for nobody. If a worker is
lost, the others stop at the barrier where it is missing, learn from the launcher who continues, and
continue. Under other launchers, such as ``torchrun``, they raise an error that names the worker.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import final

from unisono.errors import MismatchError, UnisonoError
from unisono.runtime.faults import Faults
from unisono.runtime.timeouts import REMOTE
from unisono.runtime.workers.control_block import MAILBOX_BYTES, Barrier
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.membership import Membership
from unisono.runtime.workers.memory import Memory
from unisono.runtime.workers.supervisor import Supervisor

_CHUNK_BYTES = MAILBOX_BYTES - 1024
_SAME_PROGRAM = "give every worker the same program and the same data"
_LAST, _MORE = b"\0", b"\1"

_ENDED_WITHIN_S, _LOOK_EVERY_S = 60.0, 0.02


@final
class Team:
    """The workers of a job, on one host or several. See :class:`.context.Context`."""

    def __init__(self, supervisor: Supervisor, faults: Faults | None = None) -> None:
        self.supervisor = supervisor
        self.world = supervisor.world
        self.is_replacement = supervisor.is_replacement
        self.faults = faults or Faults()
        self.membership = Membership.of(self.world.world_size)
        self._rank = self.world.rank
        self._control = supervisor.control
        self._head, self._line = self._control.head, self._control.lines[self._rank]
        self._barrier = Barrier(
            self._control,
            self.world.rank,
            notice_after_s=math.inf if supervisor.explains_waits else None,
            look_around=supervisor.poll,
        )

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the leader."""
        return self.membership.leader == self.world.rank

    @property
    def position(self) -> int:
        """This worker's index in the membership."""
        return self.membership.ranks.index(self.world.rank)

    @property
    def size(self) -> int:
        """The number of workers that compute together now."""
        return len(self.membership.ranks)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The members on each host."""
        # With several hosts, no worker is left behind.
        return self.supervisor.ranks_of_host or (self.membership.ranks,)

    @property
    def host(self) -> int:
        """The index of this worker's host."""
        return next(at for at, ranks in enumerate(self.hosts) if self.world.rank in ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The members on this worker's host, including this one: they share memory."""
        return self.hosts[self.host]

    @property
    def host_leaders(self) -> tuple[int, ...]:
        """The worker of each host that represents it; on a single host the leader."""
        if len(self.hosts) == 1:
            return (self.membership.leader,)
        return tuple(ranks[0] for ranks in self.hosts)

    @property
    def leads_host(self) -> bool:
        """Whether this worker represents its host, in the memory that the host's workers share."""
        return self.world.rank in self.host_leaders

    def meet(self, purpose: str) -> bool:
        """Wait at a barrier for a purpose, of at most 24 letters. Collective.

        Returns False if a worker was lost; :attr:`membership` has then changed. On several hosts
        a loss ends this process: its launcher starts it again.
        """
        self.arrive(purpose)
        return self.wait()

    def arrive(self, purpose: str) -> None:
        """Arrive at a barrier; :meth:`wait` must follow."""
        if not self.supervisor.is_alone:
            self._barrier.arrive(purpose)

    def wait(self) -> bool:
        """Wait until the others arrive at the barrier; returns as :meth:`meet` does."""
        if self.supervisor.is_alone:
            return True
        all_came = True
        while not self._barrier.wait():
            all_came = False
            self._stop(between_steps=False)
        return all_came

    def pause(self) -> None:
        """Stop between two steps, so that the membership can change. Collective."""
        self._stop(between_steps=True)

    def await_end(self) -> None:
        """Wait until this host's launcher ends the job, as another host's launcher does."""
        limit_s = _ENDED_WITHIN_S + REMOTE.in_s()  # another host may copy to a URL until then
        until_s = time.monotonic() + limit_s
        while not self.is_ended_by:
            for rank in self.membership.ranks:
                if (how := self._barrier.departure(rank)) == Departure.UNREACHABLE:
                    self._barrier.lose(rank, how)  # its host cannot report that the run has ended
            if time.monotonic() >= until_s:
                raise UnisonoError(
                    f"the run must end on all hosts together, but the launcher of this one was not "
                    f"told so within {limit_s:.0f} s: end it with Ctrl-C; the newest "
                    f"checkpoint has all that was computed."
                )
            time.sleep(_LOOK_EVERY_S)

    def join(self, membership: Membership) -> None:
        """Join `membership`; the control block has the number of barriers reached."""
        self.membership = membership
        self._barrier.set_membership(membership.ranks)

    def departure(self, rank: int) -> Departure:
        """Return how a worker has left, or PRESENT; detects workers that died silently."""
        return self._barrier.departure(rank)

    @property
    def has_lost(self) -> bool:
        """Whether a member has left, so that it is useless to wait for it elsewhere."""
        ranks = self.membership.ranks
        return any(self._barrier.departure(rank) != Departure.PRESENT for rank in ranks)

    def stop_if_lost(self) -> None:
        """Stop if a member has left, as a barrier would at which it is missing."""
        for rank in self.membership.ranks:
            if (how := self._barrier.departure(rank)) != Departure.PRESENT:
                self._barrier.lose(rank, how)
                self._stop(between_steps=False)

    def note_step(self, step: int) -> None:
        """Publish which step this worker is in."""
        self._line.begun = step + 1

    def note_times(self, step: int, times: Sequence[float]) -> None:
        """Publish where this worker spent a step: one number of seconds per phase."""
        self._control.set_times(self._rank, step, times)

    def times(self, rank: int, step: int) -> tuple[float, ...] | None:
        """Return what a worker published of one of its last two steps before a barrier, or None."""
        return self._control.times(rank, step)

    def note_memory(self, num_bytes: int) -> None:
        """Publish how much memory of its device this worker uses."""
        self._line.memory = num_bytes

    def memory_of(self, rank: int) -> int | None:
        """Return the memory that a worker last published for its device; None if it has not."""
        return self._control.lines[rank].memory or None

    def pid(self, rank: int) -> int | None:
        """Return the PID of a worker; None if it has not joined."""
        is_here = rank == self.world.rank
        return os.getpid() if is_here else self._control.lines[rank].process[0] or None

    def plan(self, step: int, what: int) -> None:
        """Publish, as the leader, what all workers do before `step`; arrive at a barrier next."""
        self._line.plan = what
        self._line.plan_step = step

    def planned(self, step: int) -> int:
        """Return what the leader planned before `step`; the same for all past the next barrier."""
        line = self._control.lines[self.membership.leader]
        return line.plan if line.plan_step == step else 0

    @property
    def is_stop_requested(self) -> bool:
        """Whether a launcher, or a signal to a worker, requests that all stop between two steps."""
        return bool(self._control.wish)

    @property
    def signal(self) -> int:
        """The signal that asks the workers to end the job; 0: none, or the launcher handles it."""
        return self._control.wish if self.supervisor.hears_signals else 0

    def pass_on(self, signum: int) -> bool:
        """Publish a signal that should end the job, or 0; return False if one was published."""
        is_first, self._head.wish = not self._control.wish, signum
        return is_first

    @property
    def is_ended_by(self) -> int:
        """The signal with which the launcher ends the job once all stop between steps; 0: none."""
        return int(self._head.end)

    def memory(self, key: int, num_bytes: int) -> Memory:
        """Share memory with all workers that request the same `key`. Collective."""
        return self.supervisor.memory(key, num_bytes, self.gather)

    def memory_fd(self, key: int, num_bytes: int) -> int:
        """Do the same, but return its descriptor, which the caller owns. Collective."""
        return self.supervisor.memory_fd(key, num_bytes, self.gather)

    def gather(self, message: bytes, purpose: str) -> dict[int, bytes]:
        """Gather a message from every worker, by rank. Collective: every rank calls it."""
        control = self._control
        if self.supervisor.is_alone:
            return {self.world.rank: message}
        heard: dict[int, bytes] = {}
        speaking: dict[int, list[bytes]] = {rank: [] for rank in self.membership.ranks}
        rest = memoryview(message)
        while speaking:
            chunk, rest = rest[:_CHUNK_BYTES], rest[_CHUNK_BYTES:]
            control.post(self.world.rank, (_MORE if rest else _LAST) + chunk)
            self.meet(purpose)
            # A worker that was lost before this barrier has not posted; ignore its old post.
            speaking = {
                rank: sofar for rank, sofar in speaking.items() if rank in self.membership.ranks
            }
            for rank in list(speaking):
                post = control.posted(rank)
                speaking[rank].append(post[1:])
                if post[:1] == _LAST:
                    heard[rank] = b"".join(speaking.pop(rank))
            self.meet(purpose)
        return dict(sorted(heard.items()))

    def vote(self, vote: int, purpose: str) -> dict[int, int] | None:
        """Gather a number below 2³² with one barrier; return None if a worker was lost."""
        if self.supervisor.is_alone:
            return {self.world.rank: vote}
        self._barrier.vote(vote)
        return self._barrier.votes(self.membership.ranks) if self.meet(purpose) else None

    def attach(self, data: bytes) -> None:
        """Send bytes to the workers of other hosts with this worker's next arrival."""
        self._control.attach((self._barrier.arrivals + 1) % 2, data)

    def attached(self) -> dict[int, bytes]:
        """Return and remove what workers of other hosts sent with the last arrivals, by rank."""
        return self._control.attached(self._barrier.arrivals % 2)

    def broadcast_from_leader(self, speak: Callable[[], bytes], purpose: str) -> bytes:
        """Broadcast what `speak` returns on the leader, or on the next leader. Collective."""
        return self._gather_from(lambda: (self.membership.leader,), speak, purpose)[0]

    def gather_from_host_leaders(self, speak: Callable[[], bytes], purpose: str) -> list[bytes]:
        """Return what `speak` returns on one worker of each host, by host. Collective."""
        return self._gather_from(lambda: self.host_leaders, speak, purpose)

    def agree(
        self,
        facts: Mapping[str, object],
        purpose: str = "start of a loop",
        *,
        known: Mapping[str, object] = MappingProxyType({}),
        remedy: str = "",
    ) -> None:
        """Raise if JSON values differ between workers. Collective: every rank calls it.

        `known` has values that must not differ where both workers have them; `remedy` is for these.
        """
        message = json.dumps([dict(facts), dict(known)], default=str).encode()
        heard = self.gather(message, purpose)
        said = {rank: json.loads(message) for rank, message in heard.items()}
        first = min(said)
        facts_here, known_here = said[first]
        for other, (facts_there, known_there) in said.items():
            both_know = [name for name in known_here if name in known_there]
            for names, here, there, what_to_do in (
                (facts_here, facts_here, facts_there, _SAME_PROGRAM),
                (both_know, known_here, known_there, remedy),
            ):
                for name in names:
                    if there.get(name) != here[name]:
                        raise MismatchError(
                            f"{name} must be the same on every worker, but is {here[name]!r} on "
                            f"rank {first} and {there.get(name)!r} on rank {other}: {what_to_do}."
                        )

    def _gather_from(
        self, speakers: Callable[[], tuple[int, ...]], speak: Callable[[], bytes], purpose: str
    ) -> list[bytes]:
        while True:
            ranks = speakers()
            heard = self.gather(speak() if self.world.rank in ranks else b"", purpose)
            if all(rank in heard for rank in ranks):
                return [heard[rank] for rank in ranks]

    def _stop(self, *, between_steps: bool) -> None:
        self.join(self.supervisor.stopped(self._barrier.arrivals, between_steps=between_steps))
