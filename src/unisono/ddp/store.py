"""Where do ranks leave word for each other while a process group is made? In a store of torch's.

Alone: in memory. Where MASTER_ADDR and MASTER_PORT say where rank 0 is: there, as ``env://`` does.
Else the workers are on one host and find each other as those of a :class:`unisono.Run` do; the
store is then a file without a name, a memfd of rank 0 that the others reach through /proc: no port,
and nothing that could be left over.

A process has one store for all the groups that it makes, one after the other; each has keys of its
own in it.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch.distributed.rendezvous import rendezvous

from unisono.comm.team import Team
from unisono.errors import MismatchError, RendezvousError
from unisono.world import UNISONO, World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_dist: Any = torch.distributed  # torch's stubs do not export stores
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def store_for(here: World, timeout_s: float) -> Store:
    """Return the store of this process, with keys that no group before has used.

    Collective: every rank calls it.

    Raises:
        ValueError: it is not said where rank 0 is, or by half.
        RendezvousError: the workers cannot find each other.
    """
    given = [name for name in _MASTER if os.environ.get(name)]
    if here.world_size == 1:
        base = _in_memory(os.getpid())
    elif len(given) == len(_MASTER):
        place = tuple(os.environ[name] for name in _MASTER)
        base = _at_master(os.getpid(), place, here, timeout_s)
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
        base = _in_rank_0(os.getpid())
    store: Store = _dist.PrefixStore(f"unisono/init {next(_numbers(os.getpid()))}", base)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def tell_all(store: Store, here: World, what: str, mine: str) -> list[str]:
    """Tell all ranks something and hear theirs, in rank order. Collective: every rank calls it.

    Rank 0, with which the store may end, returns when all have heard.

    Raises:
        RendezvousError: somebody did not come in time.
    """
    store.set(f"{what} of {here.rank}", mine)
    heard = [_hear(store, here, f"{what} of {rank}", rank) for rank in range(here.world_size)]
    store.set(f"{what} heard by {here.rank}", "")
    if here.rank == 0:
        for rank in range(here.world_size):
            _hear(store, here, f"{what} heard by {rank}", rank)
    return heard


def _hear(store: Store, here: World, key: str, rank: int) -> str:
    try:
        return store.get(key).decode()
    except RuntimeError as error:
        raise RendezvousError(
            f"every rank must come to `unisono.init`, but rank {rank} did not come in time to "
            f"where rank {here.rank} is ({error}): look whether it was started, and what it does "
            f"there."
        ) from error


def agree_on_seed(store: Store, here: World, seed: int | None) -> int:
    """Take one seed for all: the one that all pass, or one that rank 0 draws. Collective.

    Raises:
        MismatchError: ranks pass different ones.
        RendezvousError: somebody did not come in time.
    """
    drawn = int.from_bytes(os.urandom(7), "little")
    mine = f"drawn {drawn}" if seed is None else f"given {seed}"
    heard = tell_all(store, here, "seed", mine)
    said = [told.split() for told in heard]
    for rank, (kind, value) in enumerate(said):
        if kind != said[0][0] or (kind == "given" and value != said[0][1]):
            one, other = (v if k == "given" else "None" for k, v in (said[0], (kind, value)))
            raise MismatchError(
                f"`seed` must be the same on every rank, so that all make the same model, but is "
                f"{one} on rank 0 and {other} on rank {rank}: pass the same everywhere, and call "
                f"`seed_apart()` of what `unisono.init` returns where ranks are to differ."
            )
    return int(said[0][1])


@functools.cache
def _numbers(pid: int) -> Iterator[int]:
    return itertools.count(1)


@functools.cache
def _in_memory(pid: int) -> Store:
    store: Store = _dist.HashStore()
    return store


@functools.cache
def _at_master(pid: int, place: tuple[str, ...], here: World, timeout_s: float) -> Store:
    arguments: Any = {"rank": here.rank, "world_size": here.world_size}
    store: Store
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s), **arguments))
    return store


@functools.cache
def _in_rank_0(pid: int) -> Store:
    team = Team.from_environment()

    def speak() -> bytes:
        # Stays open as long as the process: whoever makes a group later looks here, too.
        return f"/proc/{pid}/fd/{os.memfd_create('unisono-store', os.MFD_CLOEXEC)}".encode()

    path = team.hear_lead(speak, "store of process groups").decode()
    store: Store = _dist.FileStore(path, team.world.world_size)
    return store
