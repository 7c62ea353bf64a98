"""The store of torch's through which ranks exchange messages while a process group is made.

A single worker has it in memory. With MASTER_ADDR and MASTER_PORT it is at rank 0, as for
``env://``. Otherwise the workers are on one host and find each other as those of a
:class:`unisono.Run` do; the store is then a memfd of rank 0, which the others reach through /proc:
no port, and nothing that could be left over.

A process has one store for all groups that it makes, one after the other, each with its own keys;
so has the next program of the same torchrun's workers, and each restart after a failure.
"""

from __future__ import annotations

import json
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
    """The ranks of a group that is being made. Final.

    Args:
        store: common to all, with keys that nobody else uses.
        here: this worker's place.
        timeout_s: how long a rank may take, in seconds.
        team: who knows which workers have ended; None where nobody does.
    """

    def __init__(self, store: Store, here: World, timeout_s: float, team: Team | None) -> None:
        self.store = store
        self._here, self._timeout_s, self._team = here, timeout_s, team
        self._has_said = False

    def gather(self, what: str, mine: object) -> list[Any]:
        """Gather a JSON value of every rank, in rank order. Collective: every rank calls it.

        Rank 0, with which the store may end, returns when all ranks have all values.

        Raises:
            RendezvousError: a rank did not come in time.
            PeerLostError: a rank has ended.
        """
        rank, ranks = self._here.rank, range(self._here.world_size)
        try:
            self.store.set(f"{what} of {rank}", json.dumps(mine))
            values = [json.loads(self._read(f"{what} of {other}", other)) for other in ranks]
            self.store.set(f"{what} read by {rank}", "")
            if rank == 0:
                for other in ranks:
                    self._read(f"{what} read by {other}", other)
        finally:
            self.store.set_timeout(timedelta(seconds=self._timeout_s))
        return values

    def _read(self, key: str, rank: int) -> str:
        begun_s = time.monotonic()
        waited_s = 0.0
        while True:
            # Before the look into the store: what a rank wrote before it ended counts.
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
                    raise self._gone_error(gone) from error
                # A store that fails at once will not get better.
                if waited_s >= self._timeout_s - 0.001 or now_s - asked_s < patience_s / 2:
                    raise self._missing_error(rank, error) from error
            if waited_s >= _NOTICE_AFTER_S and not self._has_said:
                self._has_said = True
                say(
                    f"rank {self._here.rank} has waited {waited_s:.0f} s in `unisono.init` for "
                    f"rank {rank}."
                )

    def _patience_s(self) -> float:
        """Return how long to wait before the next check of the others, in seconds."""
        if self._team is not None:
            return _LOOK_EVERY_S
        return self._timeout_s if self._has_said else _NOTICE_AFTER_S

    def _first_gone(self, rank: int) -> int | None:
        """Return which needed rank has ended: `rank`, or 0, which has the store; None if none."""
        if self._team is None:
            return None
        return next((other for other in (rank, 0) if self._team.has_left(other)), None)

    def _gone_error(self, rank: int) -> PeerLostError:
        return PeerLostError(
            f"every rank must come to `unisono.init` and stay until all have come, but rank "
            f"{rank} has ended while rank {self._here.rank} waits there: look at what it has said, "
            f"or what ended it (a signal, too little memory), and start all again.",
            rank=rank,
        )

    def _missing_error(self, rank: int, error: Exception) -> RendezvousError:
        return RendezvousError(
            f"every rank must come to `unisono.init`, but rank {rank} did not come in time to "
            f"where rank {self._here.rank} is ({error}): look whether it was started, and what it "
            f"does there."
        )


def ranks_for(here: World, timeout_s: float) -> Ranks:
    """Find the other ranks, in this process's store, with keys that no earlier group has used.

    Collective: every rank calls it.

    Raises:
        ValueError: the environment does not say, or half, where rank 0 is.
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
