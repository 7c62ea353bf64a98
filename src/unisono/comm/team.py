"""All workers of a run, as one of them sees it: meet, tell each other, share memory.

A process that nobody launched is a team of one; everything below works for it without waiting.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping

from unisono.comm.barrier import Barrier
from unisono.comm.control import MAILBOX_BYTES, ControlPage
from unisono.comm.link import Link
from unisono.comm.memory import Memory
from unisono.errors import MismatchError
from unisono.world import World, world

_CHUNK_BYTES = MAILBOX_BYTES - 1024
_LAST, _MORE = b"\0", b"\1"


class Team:
    """The workers of this host. Final.

    Args:
        world: this worker's place.
        control: the page shared with the others; None for a team of one.
        share: gives the same memory of the wanted size to every worker. Collective.
    """

    def __init__(
        self, world: World, control: ControlPage | None, share: Callable[[int], Memory]
    ) -> None:
        self.world = world
        self._control = control
        self._share = share
        self._barrier = None if control is None else Barrier(control, world.rank)

    @classmethod
    def from_environment(cls) -> Team:
        """Join the workers that the launcher started, or be a team of one.

        Raises:
            RuntimeError: another launcher started this process; its workers share no memory.
        """
        link = Link.from_environment()
        if link is not None:
            return cls(link.world, link.control, lambda num_bytes: _shared(link, num_bytes))
        here = world()
        if here.world_size > 1:
            raise RuntimeError(
                f"workers must be started by `unisono run` or `unisono.launch`, but RANK and "
                f"WORLD_SIZE say that another launcher started this one as {here.rank} of "
                f"{here.world_size}: use `unisono run -n {here.world_size} SCRIPT`."
            )
        return cls(here, None, Memory.private)

    def meet(self, purpose: str) -> None:
        """Wait for everybody. Collective: every rank calls it, in the same order.

        Args:
            purpose: what for, in at most 24 letters; those who come for another are told so.
        """
        if self._barrier is not None:
            self._barrier.wait(purpose)

    def note_step(self, step: int) -> None:
        """Tell those who may wait for this worker which step it is in."""
        if self._control is not None:
            self._control.set_step(self.world.rank, step)

    def memory(self, num_bytes: int) -> Memory:
        """Share memory with everybody. Collective: every rank calls it, in the same order."""
        return self._share(num_bytes)

    def gather(self, message: bytes, purpose: str) -> list[bytes]:
        """Tell everybody `message`; hear theirs, in rank order. Collective: every rank calls it."""
        if self._control is None:
            return [message]
        heard = [b""] * self.world.world_size
        going_on = True
        while going_on:
            chunk, message = message[:_CHUNK_BYTES], message[_CHUNK_BYTES:]
            self._control.post(self.world.rank, (_MORE if message else _LAST) + chunk)
            self.meet(purpose)
            posts = [self._control.posted(rank) for rank in range(self.world.world_size)]
            self.meet(purpose)
            heard = [sofar + post[1:] for sofar, post in zip(heard, posts, strict=True)]
            going_on = any(post[:1] == _MORE for post in posts)
        return heard

    def agree(self, facts: Mapping[str, object]) -> None:
        """Check that every worker says the same. Collective: every rank calls it.

        Args:
            facts: what must not differ, by name; anything that JSON can hold.

        Raises:
            MismatchError: the first name whose value differs, with both values.
        """
        message = json.dumps(facts, default=str).encode()
        said = [json.loads(heard) for heard in self.gather(message, "start of a loop")]
        for other, theirs in enumerate(said):
            for name, value in said[0].items():
                if theirs.get(name) != value:
                    raise MismatchError(
                        f"{name} must be the same on every worker, but is {value!r} on rank 0 "
                        f"and {theirs.get(name)!r} on rank {other}: give every worker the same "
                        f"program and the same data."
                    )


def _shared(link: Link, num_bytes: int) -> Memory:
    fd = link.memory(num_bytes)
    memory = Memory.map(fd, num_bytes)
    weakref.finalize(memory, link.release, fd).atexit = False
    return memory
