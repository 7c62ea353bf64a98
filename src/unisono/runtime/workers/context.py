"""Which worker is this process? Determined once per process and cached here.

Processes that would train alone by mistake are rejected:

* a child of a worker, which inherits the worker's variables but has no seat;
* a rank of a process group that is larger than RANK and WORLD_SIZE say;
* a process of ``torch.multiprocessing.spawn`` with an index above 0 and without variables. torch
  then ends the other processes and raises in the program that spawned them. A single spawned
  process, or one of a ``ProcessPoolExecutor``, trains by itself.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, final

from unisono.runtime.faults import Faults
from unisono.runtime.timeouts import RENDEZVOUS
from unisono.runtime.workers.supervisor import (
    PID_VARIABLE,
    LauncherLink,
    SingleProcess,
    Supervisor,
    has_launcher,
    is_worker,
)
from unisono.runtime.world import HOSTS_VARIABLE, SOMEBODY, World, per_process, world

if TYPE_CHECKING:
    from unisono.runtime.workers.rendezvous import Rendezvous
    from unisono.runtime.workers.replicated_calls import ReplicatedCalls
    from unisono.runtime.workers.team import Team


@final
class Context:
    """One process's place among the workers. See :func:`context`."""

    held: World | None = None  # set while the environment temporarily describes another worker
    unsaved: Exception | None = None  # why a loop's result is not saved, raised when it can be

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a descriptor must not be taken over twice
        self._link: LauncherLink | None = None
        self._joined: dict[World, ReplicatedCalls] = {}
        self._met: dict[World, Rendezvous] = {}
        self._loops: list[Callable[[], Generator[Any, None, None] | None]] = []

    def note_loop(self, steps: Generator[Any, None, None]) -> None:
        """Record a loop that has begun, so that it is closed with the program, if not before."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._loops:
            atexit.register(_leave_loops)
        self._loops = [one for one in self._loops if one() is not None]
        self._loops.append(weakref.ref(steps))

    def leave_loops(self) -> None:
        """Close loops whose steps the program refers to at its end, so that they are saved."""
        while self._loops:
            if (steps := self._loops.pop()()) is not None:
                steps.close()

    @property
    def supervisor(self) -> Supervisor:
        """Our launcher if it started this process; otherwise a stand-in for a single process."""
        return self.launcher or SingleProcess()

    @property
    def launcher(self) -> LauncherLink | None:
        """Our launcher if it started this process; otherwise None."""
        with self._lock:
            if self._link is None and has_launcher():
                self._link = _link()
            return self._link

    @property
    def world(self) -> World:
        """This worker's place, even while `as_another_worker` changes the environment."""
        link = self.launcher
        return link.world if link is not None else self.held or world()

    def rendezvous(self, timeout_s: float | None = None) -> Rendezvous:
        """Find the other workers of the job. Collective the first time: every rank calls it."""
        from unisono.runtime.workers.rendezvous import of_launcher

        link = self.launcher
        here = self.world
        with self._lock:
            if here not in self._met:
                self._met[here] = self._meet(here, timeout_s) if link is None else of_launcher(link)
            return self._met[here]

    def _meet(self, here: World, timeout_s: float | None) -> Rendezvous:
        from unisono.runtime.workers.job_store import set_master
        from unisono.runtime.workers.rendezvous import meet

        # A program that starts its ranks itself sets where they rendezvous.
        if here.world_size > 1 and not os.environ.get("MASTER_PORT"):
            refuse_children(here)
        set_master(os.environ, here)
        return meet(here, os.environ, RENDEZVOUS.in_s() if timeout_s is None else timeout_s)

    def team(self) -> Team:
        """Join the workers, as :meth:`join` does."""
        return self.join().team

    def join(self) -> ReplicatedCalls:
        """Join the workers that this process was started with, or form a team of one.

        Under a launcher other than ours: collective, every rank calls it.
        """
        # Imported here: a process that only starts a job does not need them.
        from unisono.runtime.workers.external import ExternallyLaunched
        from unisono.runtime.workers.replicated_calls import ReplicatedCalls
        from unisono.runtime.workers.team import Team

        link = self.launcher
        here = self.world
        if link is None and here.world_size > 1:
            refuse_children(here)
        refuse_larger_group(here)
        refuse_spawned(here)
        if link is None and here.world_size == 1:
            return ReplicatedCalls(Team(SingleProcess(here)))
        with self._lock:
            if here not in self._joined:
                supervisor = link or ExternallyLaunched.meet(self.rendezvous(), here)
                if link is not None:
                    link.control.take_seat(here.rank)
                    link.connect()
                faults = Faults.from_environment(os.environ, here.rank, supervisor.incarnation)
                self._joined[here] = ReplicatedCalls(Team(supervisor, faults))
            return self._joined[here]


def _link() -> LauncherLink:
    if HOSTS_VARIABLE not in os.environ:
        return LauncherLink()
    from unisono.runtime.workers.host_member import HostMember

    return HostMember()


def context() -> Context:
    """Return the context of this process, always the same one; a fork gets a new one."""
    return per_process(Context)


def _leave_loops() -> None:
    context().leave_loops()


_WRAPPER = ("torch.multiprocessing.spawn", "_wrap")


def refuse_children(here: World) -> None:
    """Raise if a worker started this process: it has the worker's variables but not its seat."""
    if PID_VARIABLE in os.environ and not is_worker():
        raise RuntimeError(
            f"a process that a worker starts must not train in its place, but this one inherited "
            f"RANK={here.rank} and WORLD_SIZE={here.world_size} from process "
            f"{os.environ[PID_VARIABLE]}: train in the worker itself; to train separately, start "
            f"this process without {PID_VARIABLE}, RANK and WORLD_SIZE."
        )


def refuse_larger_group(here: World) -> None:
    """Raise if this process's group has ranks that would not take part in training."""
    dist = _process_groups()
    if dist is None:
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > here.world_size:
        raise ValueError(
            f"every rank of torch's process group must be one of the workers that train together, "
            f"but the group has {world_size} (this process is rank {rank}) where RANK and "
            f"WORLD_SIZE say {here.world_size}: set "
            f'`os.environ["RANK"] = "{rank}"` and `os.environ["WORLD_SIZE"] = "{world_size}"`, in '
            f"each process its own rank, or start the program with `unisono run -n {world_size}` "
            f"instead of `mp.spawn`."
        )


def refuse_spawned(here: World) -> None:
    """Raise if this is one of several spawned processes that do not know of each other."""
    index = _spawned_index()
    if index == 0 or here.world_size > 1 or here.started_by == SOMEBODY or _process_groups():
        return
    raise RuntimeError(
        f"workers that train together must know of each other, but this process (index {index} of "
        f"`torch.multiprocessing.spawn`) has neither RANK nor WORLD_SIZE, and would train the "
        f"whole run alone, as each of the others: call `unisono.launch(fn, workers=…)` instead of "
        f'`mp.spawn`. To train separately in each process, set `os.environ["RANK"] = "0"` and '
        f'`os.environ["WORLD_SIZE"] = "1"` there.'
    )


def _spawned_index() -> int:
    """Return which of the processes that torch has spawned this one is; 0 for any other process."""
    process: Any = multiprocessing.current_process()
    target = getattr(process, "_target", None)
    names = (getattr(target, "__module__", ""), getattr(target, "__name__", ""))
    arguments: Any = getattr(process, "_args", ())
    if names != _WRAPPER or len(arguments) < 2 or not isinstance(arguments[1], int):
        return 0
    return arguments[1]


def _process_groups() -> Any:
    """Return torch.distributed if this process has made a process group; else None."""
    dist: Any = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    return dist if has_group else None
