"""Where do the workers of a job find each other? At one rendezvous, whatever has started them.

Each worker gets its place, the places of the others by host, and a store that every host reaches
(`job_store.py`). The workers of one host find their control block and memory through that store.

A store may outlive an attempt of the job. torchrun's agents on several hosts count attempts
differently, and some ranks may never have joined a failed attempt. So rank 0 counts for all::

    rank 0   attempt 1 ─ answers hello 1 of rank 2 ✕   attempt 2 ─ answers hellos 1 and 2
    rank 1        ✕ before it joined                     hello 1 ────────────► attempt 2
    rank 2   hello 1 ─► attempt 1 ✕                      hello 2 ────────────► attempt 2

torchrun ends all processes of an attempt before it starts the next.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from unisono.errors import PeerLostError
from unisono.runtime.procfs import NotThereError, host_name, network_name, started_at
from unisono.runtime.timeouts import RENDEZVOUS
from unisono.runtime.workers import job_store
from unisono.runtime.workers.gathering import Gathering
from unisono.runtime.world import SLURM, World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from unisono.runtime.workers.supervisor import LauncherLink


Watch = Callable[[float], None]

_TOKEN_BYTES = 16
_WHERE = "the first `Trainer`, `Run` or `unisono.distributed.init`"


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """The ranks on each host."""

    rank: int  # this worker
    # the ranks of each host, ascending; hosts are in the order of their first ranks, so rank 0 is
    # on host 0. Hosts may have different numbers of workers
    ranks_of_host: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rank: int, hosts: Sequence[str]) -> RankPlaces:
        """Group ranks by the host that each reports, in rank order."""
        ranks_of: dict[str, list[int]] = {}
        for one, host in enumerate(hosts):
            ranks_of.setdefault(host, []).append(one)
        return cls(rank, tuple(map(tuple, ranks_of.values())))

    @property
    def world_size(self) -> int:
        """The number of workers on all hosts."""
        return sum(map(len, self.ranks_of_host))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this host."""
        return next(ranks for ranks in self.ranks_of_host if self.rank in ranks)


@final
class Rendezvous:
    """What each worker gets; see :meth:`unisono.runtime.workers.context.Context`.

    `store` has keys of this attempt only. `has_ended` returns whether a rank is known here to have
    ended. `is_held`: rank 0 hosts the store, which ends with it. `watch` is called regularly with
    the seconds that this rank has waited.
    """

    def __init__(
        self,
        store: Store,
        places: RankPlaces,
        has_ended: Callable[[int], bool],
        *,
        is_held: bool = False,
        watch: Watch = lambda waited_s: None,
    ) -> None:
        self.store, self.places, self._is_held = store, places, is_held
        self.has_ended, self.watch = has_ended, watch
        # Known only to this attempt of this job: connections between workers begin with it.
        self.token = store.compare_set("token", "", os.urandom(_TOKEN_BYTES).hex()).decode()
        self._num_gathered = 0

    def gathering(
        self,
        where: str,
        timeout_s: float,
        *,
        speaks: bool = True,
        watch: Watch = lambda waited_s: None,
    ) -> Gathering:
        """Return a gathering with its own part of the store. Collective."""
        self._num_gathered += 1
        rank, world_size = self.places.rank, self.places.world_size
        store = prefixed(f"gathering {self._num_gathered}", self.store)

        def look(heard: Mapping[int, Any], missing: Sequence[int], waited_s: float) -> None:
            self.watch(waited_s)
            watch(waited_s)
            check_present(filter(self.has_ended, missing), rank, where)

        return Gathering(
            *(store, rank, world_size),
            where=where,
            timeout_s=timeout_s,
            check=look,
            speaks=speaks,
            is_held=self._is_held,
        )

    def gather(self, what: str, mine: object) -> list[Any]:
        """Gather a JSON value of every rank, in rank order. Collective: every rank calls it."""
        return self.gathering(f"`{what}`", RENDEZVOUS.in_s()).gather(what, mine)


def prefixed(prefix: str, store: Store) -> Store:
    """Return a part of a store with separate keys."""
    from torch._C._distributed_c10d import PrefixStore

    part: Store = PrefixStore(prefix, store)
    return part


def meet(here: World, environ: Mapping[str, str], timeout_s: float) -> Rendezvous:
    """Wait for all workers of a job without our launcher. Collective, once per process."""
    job = job_store.job_name(environ, here, session=os.getsid(0))
    where = f"{_WHERE} of their job (started by {here.started_by}, {job.told})"
    advice = (
        f"check whether it was started, with the same variables and, on one host, by the same user "
        f"and in the same container; {RENDEZVOUS.variable}={2 * timeout_s:g} waits longer (s)."
    )
    with _store(job, here, environ, where, timeout_s, advice) as (store, is_held):
        # The store may outlive this process, and another program may then use it. In a failed
        # attempt, ranks need not have joined equally often.
        processes, attempts = _Processes(here.rank, where), None
        if job_store.has_agent(environ) and here.local_world_size != here.world_size:
            attempts = Attempts(prefixed("unisono", store), here)
            number = attempts.join(where, timeout_s, advice)
            own = prefixed(f"unisono/attempt {number}", store)
        else:
            # Workers of another job may reach a port derived from a job's number.
            name = job.name if here.started_by == SLURM else ""
            attempt = f"unisono{name}/{job_store.num_restarts(environ)}"
            number = store.add(f"{attempt}/arrivals of {here.rank}", 1)
            own = prefixed(f"{attempt}/{number}", store)

        def look_around(heard: Mapping[int, Any], missing: Sequence[int], waited_s: float) -> None:
            if attempts is not None:
                attempts.answer()
            processes.check(heard, missing, waited_s)

        gathering = Gathering(
            *(own, here.rank, here.world_size),
            where=where,
            timeout_s=timeout_s,
            check=look_around,
            advice=advice,
            is_held=is_held,
        )
        processes.add(enumerate(gathering.gather("process", processes.mine)))
    return Rendezvous(own, processes.places, processes.has_ended, is_held=is_held)


def of_launcher(link: LauncherLink) -> Rendezvous:
    """Return the rendezvous that our launchers give their workers. Does not wait."""
    ranks_of_host = link.ranks_of_host or (tuple(range(link.world.world_size)),)
    return Rendezvous(
        link.open_store(),
        RankPlaces(link.world.rank, ranks_of_host),
        lambda rank: not link.control.departure(rank).may_be_back,
        watch=lambda waited_s: link.poll(),
    )


@final
class _Processes:
    """The processes of a job's ranks, as each rank has reported its process."""

    def __init__(self, rank: int, where: str) -> None:
        self._rank, self._where = rank, where
        # Sharing memory needs a common /proc; synchronizing needs a common loopback interface.
        self.mine = (f"{host_name()} {network_name()}", os.getpid(), started_at(os.getpid()))
        self._of_rank: dict[int, tuple[str, int, int]] = {}

    @property
    def places(self) -> RankPlaces:
        """Which ranks are on which host, once all have joined."""
        return RankPlaces.of(self._rank, [host for _, (host, *_) in sorted(self._of_rank.items())])

    def add(self, told: Iterable[tuple[int, Any]]) -> None:
        """Store the processes that ranks have reported."""
        self._of_rank |= {rank: tuple(process) for rank, process in told}

    def check(self, heard: Mapping[int, Any], missing: Sequence[int], waited_s: float) -> None:
        """Raise if a rank has ended: no rank may leave before all have joined."""
        self.add(heard.items())
        check_present(filter(self.has_ended, self._of_rank), self._rank, self._where)

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has ended; False for a rank on another host."""
        host, pid, started = self._of_rank.get(rank, ("", 0, 0))
        return host == self.mine[0] and started_at(pid) != started


@contextmanager
def _store(
    job: job_store.JobName,
    here: World,
    environ: Mapping[str, str],
    where: str,
    timeout_s: float,
    advice: str,
) -> Iterator[tuple[Store, bool]]:
    if here.world_size == 1:
        from torch._C._distributed_c10d import HashStore

        yield HashStore(), False
    elif job_store.is_at_master(environ, here):
        store = job_store.store_at_master(environ, here, where, timeout_s, advice)
        yield store, not job_store.has_agent(environ)
    elif here.rank == 0:
        with job_store.store_of_rank_0(job, here) as store:
            yield store, False
    else:
        look = functools.partial(job_store.store_there, job, here)
        yield job_store.wait_for_rank_0(look, here, where, advice, timeout_s), False


def check_present(ended: Iterable[int], rank: int, where: str) -> None:
    """Raise if any of these ranks has ended."""
    for other in ended:
        raise PeerLostError(
            f"every rank must come to {where} and stay until all have come, but rank {other} has "
            f"ended while rank {rank} waits there: look at its output, or what ended it (a signal, "
            f"too little memory), and start all ranks again.",
            rank=other,
        )


@final
class Attempts:
    """One process's place among the attempts of its job; created once per process."""

    def __init__(self, store: Store, here: World) -> None:
        self._store, self._here = store, here
        self._number = 0
        self._hello = store.add(f"hellos of {here.rank}", 1)

    def join(self, where: str, timeout_s: float, advice: str) -> int:
        """Return the number of the attempt that this process belongs to; waits for rank 0."""
        if self._here.rank == 0:
            self._number = self._store.add("attempts", 1)
            self.answer()
        return job_store.wait_for_rank_0(self._receive, self._here, where, advice, timeout_s)

    def answer(self) -> None:
        """Answer the processes that have joined since, as rank 0, while some are missing."""
        for rank in range(self._here.world_size if self._here.rank == 0 else 0):
            newest = self._store.add(f"hellos of {rank}", 0)
            self._store.set(f"attempt of {rank}/{newest}", str(self._number))

    def _receive(self, waited_s: float) -> int:
        key = f"attempt of {self._here.rank}/{self._hello}"
        if not self._store.check([key]):
            raise NotThereError("it has not answered")
        return int(self._store.get(key))
