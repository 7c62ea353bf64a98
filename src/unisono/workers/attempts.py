"""Which attempt of its job does a worker belong to, where a store outlives attempts?

torchrun's agents count attempts each for itself, not alike on several hosts, and in an attempt that
failed some ranks may never have come. So rank 0 counts, and answers every process that comes::

    rank 0   attempt 1 ─ answers hello 1 of rank 2 ✕   attempt 2 ─ answers hellos 1 and 2
    rank 1        ✕ before it came                       hello 1 ────────────► attempt 2
    rank 2   hello 1 ─► attempt 1 ✕                      hello 2 ────────────► attempt 2

torchrun ends all processes of an attempt before it starts the next one's: an answer to one that is
gone is never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.workers.job_store import wait_for_rank_0
from unisono.workers.proc import NotThereError
from unisono.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Attempts:
    """One process's place among the attempts of its job. Final; each process makes one."""

    def __init__(self, store: Store, here: World) -> None:
        self._store, self._here = store, here
        self._number = 0
        self._hello = store.add(f"hellos of {here.rank}", 1)

    def join(self, where: str, timeout_s: float, advice: str) -> int:
        """Tell which attempt this process belongs to; waits for rank 0.

        Args:
            where: what the workers come to, for messages.
            timeout_s: how long rank 0 may take, in seconds.
            advice: what to do if it does not come.

        Raises:
            WaitTimeoutError: rank 0 did not come in time.
        """
        if self._here.rank == 0:
            self._number = self._store.add("attempts", 1)
            self.answer()
        return wait_for_rank_0(self._heard, self._here, where, advice, timeout_s)

    def answer(self) -> None:
        """Answer those who have come since, as rank 0, as long as some are missing."""
        for rank in range(self._here.world_size if self._here.rank == 0 else 0):
            newest = self._store.add(f"hellos of {rank}", 0)
            self._store.set(f"attempt of {rank}/{newest}", str(self._number))

    def _heard(self, waited_s: float) -> int:
        key = f"attempt of {self._here.rank}/{self._hello}"
        if not self._store.check([key]):
            raise NotThereError("it has not answered")
        return int(self._store.get(key))
