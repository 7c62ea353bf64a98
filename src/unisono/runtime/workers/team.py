"""All workers of a run, as one of them sees it: meet, tell each other, share memory.

A process that nobody started among others is a team of one, and waits for nobody. If a worker is
lost, the others stop where they miss it, hear from the launcher who continues, and continue. Under
another launcher than ours, such as ``torchrun``, they raise an error that names the lost one.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from unisono.errors import MismatchError, UnisonoError
from unisono.runtime.faults import Faults
from unisono.runtime.workers.control_block import MAILBOX_BYTES, Barrier
from unisono.runtime.workers.launcher_messages import Membership
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.memory import Memory
from unisono.runtime.workers.supervisor import Supervisor

_CHUNK_BYTES = MAILBOX_BYTES - 1024
_SAME_PROGRAM = "give every worker the same program and the same data"
_LAST, _MORE = b"\0", b"\1"

_ENDED_WITHIN_S, _LOOK_EVERY_S = 60.0, 0.02


class StepBrokenError(BaseException):
    """A worker was lost, so that the step under way cannot be finished: the run goes back.

    No :class:`Exception`: it passes through the program's functions, to the step.
    """


class Team:
    """The workers of a job, on one host or several. Final; see :class:`.context.Context`."""

    def __init__(self, supervisor: Supervisor, faults: Faults | None = None) -> None:
        self.supervisor = supervisor
        self.world = supervisor.world
        self.is_replacement = supervisor.can_replace and supervisor.incarnation > 0
        self.faults = faults or Faults()
        self.membership = Membership.of(self.world.world_size)
        self._rank = self.world.rank
        self._control = supervisor.control
        self._head, self._line = self._control.head, self._control.lines[self._rank]
        self._barrier = Barrier(
            self._control,
            self.world.rank,
            notice_after_s=math.inf if supervisor.explains_waits else None,
            look_around=supervisor.look,
        )

    @property
    def is_leader(self) -> bool:
        """Whether this worker speaks for all."""
        return self.membership.leader == self.world.rank

    @property
    def position(self) -> int:
        """Count the workers of the membership before this one."""
        return self.membership.ranks.index(self.world.rank)

    @property
    def size(self) -> int:
        """Count the workers that compute together now."""
        return len(self.membership.ranks)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The members on each host."""
        # Where there are several, nobody is left behind.
        return self.supervisor.ranks_of_host or (self.membership.ranks,)

    @property
    def host(self) -> int:
        """Which host this worker is on, counted from 0."""
        return next(at for at, ranks in enumerate(self.hosts) if self.world.rank in ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The members on this worker's host, this one among them: those that share memory."""
        return self.hosts[self.host]

    @property
    def host_leaders(self) -> tuple[int, ...]:
        """The worker of each host that speaks for those on it; on a single host the leader."""
        if len(self.hosts) == 1:
            return (self.membership.leader,)
        return tuple(ranks[0] for ranks in self.hosts)

    @property
    def leads_host(self) -> bool:
        """Whether this worker speaks for those on its host, in the memory that they share."""
        return self.world.rank in self.host_leaders

    def meet(self, purpose: str) -> bool:
        """Wait for everybody who comes for a purpose, of at most 24 letters. Collective.

        False if a worker was lost; :attr:`membership` is another one then. A StepBrokenError where
        it is replaced on several hosts.
        """
        self.come(purpose)
        return self.wait()

    def come(self, purpose: str) -> None:
        """Come to a meeting; :meth:`wait` has to follow."""
        if not self.supervisor.is_alone:
            self._barrier.arrive(purpose)

    def wait(self) -> bool:
        """Wait for everybody where this worker has come; returns as :meth:`meet` does."""
        if self.supervisor.is_alone:
            return True
        all_came = True
        while not self._barrier.wait():
            all_came = False
            self._stop(between_steps=False)
            if len(self.hosts) > 1:
                raise StepBrokenError
        return all_came

    def pause(self) -> None:
        """Stand still between two steps, so that the membership can change. Collective."""
        self._stop(between_steps=True)

    def await_end(self) -> None:
        """Stand still until the launcher of this host ends the job, as another host's does."""
        until_s = time.monotonic() + _ENDED_WITHIN_S
        while not self.is_ended_by:
            if time.monotonic() >= until_s:
                raise UnisonoError(
                    f"the run must end on all hosts together, but the launcher of this one was not "
                    f"told so within {_ENDED_WITHIN_S:.0f} s: end it with Ctrl-C; the newest "
                    f"checkpoint has all that was computed."
                )
            time.sleep(_LOOK_EVERY_S)

    def join(self, membership: Membership) -> None:
        """Belong to `membership`; the control block says how many meetings it has come to."""
        self.membership = membership
        self._barrier.set_membership(membership.ranks)

    def departure(self, rank: int) -> Departure:
        """Look how a worker has left, if it has, also without a word."""
        return self._barrier.departure(rank)

    def has_gone_further(self, rank: int) -> bool:
        """Return whether a worker has come to the meeting that this one comes to next."""
        return self._barrier.has_gone_further(rank)

    @property
    def has_lost(self) -> bool:
        """Whether a member has left, so that waiting for it elsewhere is in vain."""
        ranks = self.membership.ranks
        return any(self._barrier.departure(rank) != Departure.PRESENT for rank in ranks)

    @property
    def will_begin_again(self) -> bool:
        """Whether all workers of several hosts begin again in the next step, as one was lost."""
        departures = map(self._barrier.departure, self.membership.ranks)
        is_awaited = all(how.may_be_back for how in departures)
        supervisor = self.supervisor
        is_replaced = supervisor.can_replace and is_awaited
        return len(self.hosts) > 1 and not supervisor.can_go_back and is_replaced

    def note_step(self, step: int) -> None:
        """Tell those who may wait for this worker which step it is in."""
        self._line.begun = step + 1

    def note_times(self, step: int, times: Sequence[float]) -> None:
        """Tell the others where this worker spent a step: eight numbers of seconds."""
        self._control.set_times(self._rank, step, times)

    def times(self, rank: int, step: int) -> tuple[float, ...] | None:
        """Read what a worker told, before all met, of one of its last two steps; None: nothing."""
        return self._control.times(rank, step)

    def note_memory(self, num_bytes: int) -> None:
        """Tell the others how much memory of its device this worker takes."""
        self._line.memory = num_bytes

    def memory_of(self, rank: int) -> int | None:
        """Read what a worker said last of its device's memory; None if it has not."""
        return self._control.lines[rank].memory or None

    def pid(self, rank: int) -> int | None:
        """Return the process of a worker; None if it has not come."""
        is_here = rank == self.world.rank
        return os.getpid() if is_here else self._control.lines[rank].process[0] or None

    def plan(self, step: int, what: int) -> None:
        """Report, as the leader, what everybody does before `step`; then come to a meeting."""
        self._line.plan = what
        self._line.plan_step = step

    def planned(self, step: int) -> int:
        """Read what the leader has planned before `step`; the same for all who met it since."""
        line = self._control.lines[self.membership.leader]
        return line.plan if line.plan_step == step else 0

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether a launcher, or a signal to a worker, wishes that all stop between two steps."""
        return bool(self._control.wish)

    @property
    def signal(self) -> int:
        """Which signal to a worker is to end the job, where workers hear signals; 0: none."""
        return self._control.wish if self.supervisor.hears_signals else 0

    def pass_on(self, signum: int) -> bool:
        """Report a signal that is to end the job, or 0, to all; return False if they know one."""
        is_first, self._head.wish = not self._control.wish, signum
        return is_first

    @property
    def is_ended_by(self) -> int:
        """Which signal has the launcher end the job when all stop between two steps; 0: none."""
        return int(self._head.end)

    def memory(self, key: int, num_bytes: int) -> Memory:
        """Share memory with everybody who asks with the same `key`. Collective."""
        return self.supervisor.memory(key, num_bytes, self.gather)

    def memory_fd(self, key: int, num_bytes: int) -> int:
        """Do the same, and give its descriptor, which is the caller's. Collective."""
        return self.supervisor.memory_fd(key, num_bytes, self.gather)

    def gather(self, message: bytes, purpose: str) -> dict[int, bytes]:
        """Send everybody `message`; return theirs, by rank. Collective: every rank calls it."""
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
            # Who was lost before it came has not posted this, and nobody believes what it posted.
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
        """Do :meth:`gather` with a number below 2³², in one meeting; None if a worker was lost."""
        if self.supervisor.is_alone:
            return {self.world.rank: vote}
        self._barrier.vote(vote)
        return self._barrier.votes(self.membership.ranks) if self.meet(purpose) else None

    def put_beside(self, data: bytes) -> None:
        """Have the workers of other hosts get some bytes with this worker's next arrival."""
        self._control.put_beside((self._barrier.arrivals + 1) % 2, data)

    def beside(self) -> dict[int, bytes]:
        """Take what workers of other hosts have sent with the arrivals waited for last, by rank."""
        return self._control.beside(self._barrier.arrivals % 2)

    def hear_leader(self, speak: Callable[[], bytes], purpose: str) -> bytes:
        """Have the leader, or the next one, call `speak`; hear what it says. Collective."""
        return self._hear(lambda: (self.membership.leader,), speak, purpose)[0]

    def hear_host_leaders(self, speak: Callable[[], bytes], purpose: str) -> list[bytes]:
        """Have one worker of each host call `speak`; hear what each says, by host. Collective."""
        return self._hear(lambda: self.host_leaders, speak, purpose)

    def agree(
        self,
        facts: Mapping[str, object],
        purpose: str = "start of a loop",
        *,
        known: Mapping[str, object] = MappingProxyType({}),
        remedy: str = "",
    ) -> None:
        """Refuse values, of JSON, that differ between workers. Collective: every rank calls it.

        In `known` is what must not differ between workers that both tell it; `remedy` is for that.
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

    def _hear(
        self, speakers: Callable[[], tuple[int, ...]], speak: Callable[[], bytes], purpose: str
    ) -> list[bytes]:
        while True:
            ranks = speakers()
            heard = self.gather(speak() if self.world.rank in ranks else b"", purpose)
            if all(rank in heard for rank in ranks):
                return [heard[rank] for rank in ranks]

    def _stop(self, *, between_steps: bool) -> None:
        self.join(self.supervisor.stopped(self._barrier.arrivals, between_steps=between_steps))
