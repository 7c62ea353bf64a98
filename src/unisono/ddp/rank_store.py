"""Where do ranks leave word for each other while a process group is made? In a store of torch's.

Alone: in memory. Where MASTER_ADDR and MASTER_PORT say where rank 0 is: there, as ``env://`` does.
Else the workers are on one host and find each other as those of a :class:`unisono.Run` do; the
store is then a file without a name, a memfd of rank 0 that the others reach through /proc: no port,
and nothing that could be left over.

A process has one store for all the groups that it makes, one after the other; each has keys of its
own in it. So have those of the program that the same torchrun's workers run next, and those that it
starts again after a failure.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.distributed.rendezvous import rendezvous

from unisono.errors import PeerLostError, RendezvousError
from unisono.notices import say
from unisono.per_process import per_process
from unisono.workers.context import context
from unisono.workers.jobname import num_restarts
from unisono.workers.team import Team
from unisono.world import UNISONO, World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_dist: Any = torch.distributed  # torch's stubs do not export stores
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_NOTICE_AFTER_S = 10.0
_LOOK_EVERY_S = 0.2


class Ranks:
    """The ranks of a group that is being made, who tell each other things. Final.

    Args:
        store: common to all, with keys that nobody else uses.
        here: this worker's place.
        timeout_s: how long a rank may take, in seconds.
        team: who knows which workers have ended; None where nobody does.
    """

    def __init__(self, store: Store, here: World, timeout_s: float, team: Team | None) -> None:
        self.store = store
        self._here, self._timeout_s, self._team = here, timeout_s, team
        self._is_told = False

    def tell_all(self, what: str, mine: str) -> list[str]:
        """Tell all ranks something and hear theirs, in rank order. Collective: every rank calls it.

        Rank 0, with which the store may end, returns when all have heard.

        Raises:
            RendezvousError: somebody did not come in time.
            PeerLostError: somebody has ended.
        """
        rank, ranks = self._here.rank, range(self._here.world_size)
        try:
            self.store.set(f"{what} of {rank}", mine)
            heard = [self._hear(f"{what} of {other}", other) for other in ranks]
            self.store.set(f"{what} heard by {rank}", "")
            if rank == 0:
                for other in ranks:
                    self._hear(f"{what} heard by {other}", other)
        finally:
            self.store.set_timeout(timedelta(seconds=self._timeout_s))
        return heard

    def _hear(self, key: str, rank: int) -> str:
        begun_s = time.monotonic()
        waited_s = 0.0
        while True:
            # First of all: what somebody has said before it ended is heard.
            gone = self._first_gone(rank)
            patience_s = min(self._patience_s(), self._timeout_s - waited_s)
            self.store.set_timeout(timedelta(seconds=patience_s))
            asked_s = time.monotonic()
            try:
                return self.store.get(key).decode()
            except RuntimeError as error:
                now_s = time.monotonic()
                waited_s = now_s - begun_s
                if gone is not None:
                    raise self._left(gone) from error
                # A store that fails at once will not get better.
                if waited_s >= self._timeout_s - 0.001 or now_s - asked_s < patience_s / 2:
                    raise self._missing(rank, error) from error
            if waited_s >= _NOTICE_AFTER_S and not self._is_told:
                self._is_told = True
                say(
                    f"rank {self._here.rank} has waited {waited_s:.0f} s in `unisono.init` for "
                    f"rank {rank}."
                )

    def _patience_s(self) -> float:
        """Tell for how long to wait before looking around, in seconds."""
        if self._team is not None:
            return _LOOK_EVERY_S
        return self._timeout_s if self._is_told else _NOTICE_AFTER_S

    def _first_gone(self, rank: int) -> int | None:
        """Tell which of those has ended whose word is needed: `rank`, or 0, who has the store."""
        if self._team is None:
            return None
        return next((other for other in (rank, 0) if self._team.has_left(other)), None)

    def _left(self, rank: int) -> PeerLostError:
        return PeerLostError(
            f"every rank must come to `unisono.init` and stay until all have come, but rank "
            f"{rank} has ended while rank {self._here.rank} waits there: look at what it has said, "
            f"or what ended it (a signal, too little memory), and start all again.",
            rank=rank,
        )

    def _missing(self, rank: int, error: Exception) -> RendezvousError:
        return RendezvousError(
            f"every rank must come to `unisono.init`, but rank {rank} did not come in time to "
            f"where rank {self._here.rank} is ({error}): look whether it was started, and what it "
            f"does there."
        )


def ranks_for(here: World, timeout_s: float) -> Ranks:
    """Find the others, in the store of this process, with keys that no group before has used.

    Collective: every rank calls it.

    Raises:
        ValueError: it is not said where rank 0 is, or by half.
        RendezvousError: the workers cannot find each other.
    """
    given = [name for name in _MASTER if os.environ.get(name)]
    team = None
    if here.world_size == 1:
        base = per_process(_dist.HashStore)
    elif len(given) == len(_MASTER):
        place = tuple(os.environ[name] for name in _MASTER)
        base = per_process(_at_master, place, here, timeout_s)
    elif given and here.started_by != UNISONO:  # ours says a port only where one is needed
        raise ValueError(
            f"`MASTER_ADDR` and `MASTER_PORT` must be set together, but only {given[0]} is: set "
            f"both, or, where all workers are on one host, none."
        )
    elif here.local_world_size != here.world_size:
        raise ValueError(
            f"`MASTER_ADDR` and `MASTER_PORT` must say where rank 0 is where workers are on "
            f"several hosts ({here.local_world_size} of {here.world_size} on this one), but are "
            f"not set: set both in every process."
        )
    else:
        team = context().team()
        base = per_process(_in_rank_0)
    # Counted in the store: it may outlive this process, and another program may then use it. For
    # each attempt anew: in one that failed, ranks need not have come equally often.
    attempt = f"unisono/attempt {num_restarts(os.environ)}"
    number = base.add(f"{attempt}/inits of rank {here.rank}", 1)
    store: Store = _dist.PrefixStore(f"{attempt}/init {number}", base)
    store.set_timeout(timedelta(seconds=timeout_s))
    return Ranks(store, here, timeout_s, team)


def _at_master(place: tuple[str, ...], here: World, timeout_s: float) -> Store:
    arguments: Any = {"rank": here.rank, "world_size": here.world_size}
    store: Store
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s), **arguments))
    return store


def _in_rank_0() -> Store:
    team = context().team()

    def speak() -> bytes:
        # Stays open as long as the process: whoever makes a group later looks here, too.
        return f"/proc/{os.getpid()}/fd/{os.memfd_create('unisono-store', os.MFD_CLOEXEC)}".encode()

    path = team.hear_leader(speak, "store of process groups").decode()
    store: Store = _dist.FileStore(path, team.world.world_size)
    return store
