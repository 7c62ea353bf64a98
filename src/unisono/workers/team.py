"""All workers of a run, as one of them sees it: meet, tell each other, share memory.

A process that nobody started among others is a team of one; everything below works for it without
waiting. Whoever is lost on the way is left behind: the others stop where they miss it, hear from
the launcher who goes on, and go on. Under another launcher than ours, such as ``torchrun``, the
workers find each other and nobody is left behind: the others raise an error that names the one that
is lost.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from unisono.errors import MismatchError
from unisono.faults import Faults
from unisono.workers.barrier import Barrier
from unisono.workers.control_block import MAILBOX_BYTES, ControlBlock, Departure
from unisono.workers.external import (
    ExternallyLaunched,
    meet_others,
    refuse_larger_group,
    refuse_strangers,
)
from unisono.workers.jobname import num_restarts
from unisono.workers.launcher_link import LauncherLink
from unisono.workers.membership import Membership
from unisono.workers.memory import Memory
from unisono.workers.proc import started_at
from unisono.workers.single_process import SingleProcess
from unisono.workers.spawned import refuse_spawned
from unisono.workers.supervisor import Supervisor
from unisono.world import World, world

_CHUNK_BYTES = MAILBOX_BYTES - 1024
_SAME_PROGRAM = "give every worker the same program and the same data"
_LAST, _MORE = b"\0", b"\1"


class Team:
    """The workers of this host. Final.

    Args:
        world: this worker's place.
        control: the control block shared with the others; None for a team of one.
        host: the one who started this worker; None: nobody of ours did, they have found each other.
        faults: what is to go wrong here, for tests.
        is_replacement: whether this worker takes the place of one that was lost.
        look: see :class:`unisono.workers.barrier.Barrier`.

    Attributes:
        membership: who computes together now.
    """

    def __init__(
        self,
        world: World,
        control: ControlBlock | None,
        host: Supervisor | None,
        faults: Faults | None = None,
        *,
        is_replacement: bool = False,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.world = world
        self.supervisor: Supervisor = (
            ExternallyLaunched(world.rank, self.gather) if host is None else host
        )
        self.is_replacement = is_replacement
        self.faults = faults or Faults()
        self.membership = Membership(tuple(range(world.world_size)), leader=0)
        self._control = control
        self._own_plan = (0, 0)
        self._own_times: dict[int, tuple[float, ...]] = {}
        self._barrier = None if control is None else Barrier(control, world.rank, look=look)

    @staticmethod
    def from_environment() -> Team:
        """Join the workers among whom this one was started, or be a team of one.

        Under another launcher than ours: collective, every rank calls it; waits for all of them the
        first time.

        Raises:
            ValueError: the environment does not say clearly who this worker is, or torch's process
                group has more ranks than that says.
            RuntimeError: this process cannot be one of the workers, or does not know the others.
            RendezvousError: the workers cannot find each other.
            WaitTimeoutError: somebody did not come in time.
            PeerLostError: somebody came and left before all were there.
        """
        link = LauncherLink.from_environment()
        here = world() if link is None else link.world
        if link is None and here.world_size > 1:
            refuse_strangers(here)
        refuse_larger_group(here)
        refuse_spawned(here)
        if link is not None:
            return _team_of(link, os.getpid())
        if here.world_size == 1:
            return Team(here, None, SingleProcess())
        return _team_of_found(here, os.getpid())

    @property
    def is_launched(self) -> bool:
        """Whether somebody started this process as one of several workers, be it of one."""
        return self._control is not None

    @property
    def is_leader(self) -> bool:
        """Whether this worker speaks for all."""
        return self.membership.leader == self.world.rank

    @property
    def position(self) -> int:
        """Count the workers of the membership before this one."""
        return self.membership.position(self.world.rank)

    @property
    def size(self) -> int:
        """Count the workers that compute together now."""
        return len(self.membership.ranks)

    def meet(self, purpose: str) -> bool:
        """Wait for everybody. Collective: every rank calls it, in the same order.

        Args:
            purpose: what for, in at most 24 letters; those who come for another are told so.

        Returns:
            Whether all came; False if somebody was lost, and :attr:`membership` is another one now.
        """
        if self._barrier is None:
            return True
        self._barrier.arrive(purpose)
        all_came = True
        while not self._barrier.wait():
            all_came = False
            self._take(self.supervisor.stopped(self._barrier.arrivals, between_steps=False))
        return all_came

    def pause(self) -> None:
        """Stand still between two steps, so that the membership can change. Collective."""
        if self._barrier is not None:
            self._take(self.supervisor.stopped(self._barrier.arrivals, between_steps=True))

    def join(self, membership: Membership) -> None:
        """Belong to `membership`; the control block says to how many meetings it has come."""
        self._take(membership)

    def has_left(self, rank: int) -> bool:
        """Look whether a worker has ended for good, with a word or without."""
        if self._barrier is None:
            return False
        return self._barrier.departure(rank) not in (Departure.PRESENT, Departure.LOST)

    @property
    def has_lost(self) -> bool:
        """Whether a member has left, so that whoever waits for it elsewhere waits in vain."""
        barrier = self._barrier
        if barrier is None:
            return False
        return any(barrier.departure(rank) != Departure.PRESENT for rank in self.membership.ranks)

    def note_step(self, step: int) -> None:
        """Tell those who may wait for this worker which step it is in."""
        if self._control is not None:
            self._control.set_step(self.world.rank, step)

    def note_times(self, step: int, times: Sequence[float]) -> None:
        """Tell the others where this worker spent a step: seven numbers of seconds."""
        if self._control is None:
            self._own_times = {step - 1: self._own_times.get(step - 1, ()), step: tuple(times)}
        else:
            self._control.set_times(self.world.rank, step, times)

    def times(self, rank: int, step: int) -> tuple[float, ...] | None:
        """Read what a worker has told of one of its last two steps; None if it has not.

        Of another worker: once all have met since.
        """
        if self._control is None:
            return self._own_times.get(step) or None
        return self._control.times(rank, step)

    def pid(self, rank: int) -> int | None:
        """Tell the process of a worker; None if it has not come."""
        if self._control is None:
            return os.getpid()
        return self._control.process(rank)[0] or None

    def plan(self, step: int, what: int) -> None:
        """Say, as the leader, what everybody does before `step`; then come to a meeting."""
        if self._control is None:
            self._own_plan = (step, what)
        else:
            self._control.set_plan(self.world.rank, step, what)

    def planned(self, step: int) -> int:
        """Read what the leader has planned before `step`; the same for all who met it since."""
        if self._control is None:
            return self._own_plan[1] if self._own_plan[0] == step else 0
        return self._control.plan(self.membership.leader, step)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the launcher wishes that all stop between two steps."""
        return self._control is not None and self._control.wish

    @property
    def is_ended_by(self) -> int:
        """Which signal has the launcher end the job when all stop between two steps; 0: none."""
        return 0 if self._control is None else self._control.end

    def memory(self, key: int, num_bytes: int) -> Memory:
        """Share memory with everybody who asks with the same `key`."""
        return self.supervisor.memory(key, num_bytes)

    def gather(self, message: bytes, purpose: str) -> dict[int, bytes]:
        """Tell everybody `message`; hear theirs, by rank. Collective: every rank calls it.

        Returns:
            The messages of those who came, the same on every worker that goes on.
        """
        control = self._control
        if control is None:
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

    def hear_leader(self, speak: Callable[[], bytes], purpose: str) -> bytes:
        """Have the leader call `speak`, and hear what it says. Collective: every rank calls it.

        If the leader is lost before it has spoken, the next one does.
        """
        while True:
            leader = self.membership.leader
            heard = self.gather(speak() if self.is_leader else b"", purpose)
            if leader in heard:
                return heard[leader]

    def agree(
        self,
        facts: Mapping[str, object],
        purpose: str = "start of a loop",
        *,
        known: Mapping[str, object] = MappingProxyType({}),
        remedy: str = "",
    ) -> None:
        """Check that every worker says the same. Collective: every rank calls it.

        Args:
            facts: what must not differ, by name; anything that JSON can hold.
            purpose: what for, as for :meth:`meet`.
            known: what must not differ between workers that both tell it.
            remedy: what to do where that differs.

        Raises:
            MismatchError: the first name whose value differs, with both values.
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

    def _take(self, membership: Membership) -> None:
        self.membership = membership
        if self._barrier is not None:
            self._barrier.set_membership(membership.ranks)


@functools.cache
def _team_of(link: LauncherLink, pid: int) -> Team:
    # One for all runs of a process: they share what the launcher knows of it.
    faults = Faults.from_environment(os.environ, link.world.rank, link.incarnation)
    link.control.set_process(link.world.rank, pid, started_at(pid) or 0)
    return Team(link.world, link.control, link, faults, is_replacement=link.incarnation > 0)


@functools.cache
def _team_of_found(here: World, pid: int) -> Team:
    # One for all runs of a process: it has one seat. `pid` is part of the key, as above.
    control, watch = meet_others(here)
    faults = Faults.from_environment(os.environ, here.rank, num_restarts(os.environ))
    return Team(here, control, None, faults, look=watch.look)
