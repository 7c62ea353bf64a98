"""Where do the workers of a job find each other? At one rendezvous, whoever has started them.

==========================  ===========================================  =========================
the workers were started    their store is                               what listens for it
==========================  ===========================================  =========================
by our launcher             a file without a name, held by the launcher  nothing
by torchrun, or on          torch's ``TCPStore`` at MASTER_ADDR and      torchrun's agent; without
several hosts               MASTER_PORT                                  one rank 0, there alone
by another one, or by       a file without a name, held by rank 0, which nothing
hand, on one host           announces it in a private folder
by nobody                   in the process                               nothing
==========================  ===========================================  =========================

All of them give each worker the same: its place, the place of the others by host, and a store that
every host reaches. What only one host can share (control block, memory, pidfds) is found through
that store, and belongs to the workers of that host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class Places:
    """Which ranks are on which host.

    Attributes:
        rank: this worker.
        ranks_of_host: the ranks of each host, ascending; hosts are in the order of their first
            ranks, so host 0 has rank 0. Hosts may have different numbers of workers.
    """

    rank: int
    ranks_of_host: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        """The number of workers on all hosts."""
        return sum(self.host_sizes)

    @property
    def host(self) -> int:
        """Which host this worker is on, counted from 0."""
        return next(host for host, ranks in enumerate(self.ranks_of_host) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """Count the workers of this host before this one."""
        return self.ranks_of_host[self.host].index(self.rank)

    @property
    def local_size(self) -> int:
        """The number of workers on this host."""
        return self.host_sizes[self.host]

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """The number of workers on each host."""
        return tuple(map(len, self.ranks_of_host))


class Rendezvous(Protocol):
    """What every worker of a job gets.

    Attributes:
        places: who is where.
        token: 32 hexadecimal digits that only this attempt of this job knows; the same on every
            worker. Whoever connects to one of them shows it.
        store: torch's store, with keys of this attempt alone. Every worker on every host reaches
            it as long as the job lives, so ``PrefixStore("name", store)`` makes process groups.
    """

    places: Places
    token: str
    store: Store

    def gather(self, what: str, mine: object) -> list[Any]:
        """Gather a JSON value of every rank, in rank order. Collective: every rank calls it.

        Args:
            what: names the call; each name counts once.
            mine: this rank's value.

        Raises:
            WaitTimeoutError: a rank did not come in time; `missing` says which.
            PeerLostError: a rank has ended; `rank` says which.
        """
