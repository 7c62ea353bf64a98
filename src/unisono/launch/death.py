"""Why was a worker killed? What the kernel and the control block know beside the signal's number.

    SIGKILL   has the kernel run out of memory since the job began?  Who held how much of it?
    SIGBUS    is /dev/shm full?
    SIGABRT   did ranks make different calls of torch.distributed?  gloo aborts where sizes differ

Where nothing is known, nothing is said: ``report.ending`` has words for the signal alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from unisono.procfs import field, read_text
from unisono.quantities import size
from unisono.workers.control_block import ControlBlock

_LOOK_EVERY_S = 0.5
_FULL_BELOW = 0.05  # of what there is
_SMALLER = "use a smaller batch or fewer workers"


class Deaths:
    """Looks at the memory of one job's workers, and explains how they end. Final.

    Args:
        control: their control block.
        root: where the kernel tells of processes.
        shared: where processes share files in memory.
        clock: gives the time, in seconds.
    """

    def __init__(
        self,
        control: ControlBlock,
        root: Path = Path("/proc"),
        shared: str = "/dev/shm",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control, self._root, self._shared, self._clock = control, root, shared, clock
        self._num_kills = _out_of_memory_kills(root)
        self._held: dict[int, int] = {}
        self._looked_at_s = -_LOOK_EVERY_S

    def look(self, pids: Mapping[int, int]) -> None:
        """Note how much memory each rank's process holds, at most twice a second."""
        if self._clock() - self._looked_at_s < _LOOK_EVERY_S:
            return
        self._looked_at_s = self._clock()
        found = {rank: _held_bytes(self._root, pid) for rank, pid in pids.items()}
        self._held |= {rank: held for rank, held in found.items() if held}

    def how(self, exit_code: int) -> str:
        """Say how a worker has ended, if more is known than its exit status; else nothing."""
        match -exit_code:
            case signal.SIGKILL:
                return self._out_of_memory()
            case signal.SIGBUS:
                return self._shared_is_full()
            case signal.SIGABRT:
                return self._calls_apart()
        return ""

    def _out_of_memory(self) -> str:
        num_kills = _out_of_memory_kills(self._root)
        if num_kills <= self._num_kills:
            return ""
        self._num_kills = num_kills
        each = ", ".join(f"worker {rank} {size(held)}" for rank, held in sorted(self._held.items()))
        total = (field(read_text(self._root / "meminfo"), "MemTotal:") or 0) * 1024
        had = f" of memory: shortly before, these held {each}" if each else " of memory"
        return (
            f"was killed by SIGKILL, as the kernel had run out{had}, and the machine has "
            f"{size(total)}, of which a container may get less: {_SMALLER}"
        )

    def _shared_is_full(self) -> str:
        with contextlib.suppress(OSError):
            found = os.statvfs(self._shared)
            if found.f_bavail < _FULL_BELOW * found.f_blocks:
                total = size(found.f_blocks * found.f_frsize)
                return (
                    f"was killed by SIGBUS, as {self._shared} is full ({total}): remove what other "
                    "programs have left there, give the container more (`docker run --shm-size`), "
                    "or use a DataLoader with `num_workers=0`"
                )
        return ""

    def _calls_apart(self) -> str:
        calls = [self._control.call_of(rank) for rank in range(self._control.world_size)]
        if len({count for count, _ in calls}) > 1 or len({call for _, call in calls}) == 1:
            return ""
        each = ", ".join(
            f"rank {rank} `{call.decode(errors='replace')}`" for rank, (_, call) in enumerate(calls)
        )
        return (
            f"was killed by SIGABRT, as ranks called different collectives: {each}. Every rank "
            "must make the same calls in the same order, with tensors of one shape and dtype"
        )


def _out_of_memory_kills(root: Path) -> int:
    """Count the processes that the kernel has killed for want of memory. Source: proc(5)."""
    return field(read_text(root / "vmstat"), "oom_kill") or 0


def _held_bytes(root: Path, pid: int) -> int:
    return (field(read_text(root / str(pid) / "status"), "VmRSS:") or 0) * 1024
