"""What is this process among the workers? Found once, kept here, and passed on from here."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from unisono.faults import Faults
from unisono.per_process import per_process
from unisono.timeouts import RENDEZVOUS
from unisono.workers.launcher_link import LauncherLink, has_launcher
from unisono.workers.launcher_messages import ComputesOn
from unisono.workers.supervisor import SingleProcess, Supervisor
from unisono.world import HOSTS_VARIABLE, WORKERS_PER_GPU_VARIABLE, World, world

if TYPE_CHECKING:
    from unisono.workers.joint_calls import JointCalls
    from unisono.workers.rendezvous import Rendezvous
    from unisono.workers.team import Team


class Context:
    """One process's place among the workers. Final; see :func:`context`.

    Attributes:
        held: who this worker is while the environment says something else for a moment.
    """

    held: World | None = None

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a descriptor must not be taken over twice
        self._link: LauncherLink | None = None
        self._joined: dict[World, JointCalls] = {}
        self._met: dict[World, Rendezvous] = {}

    @property
    def supervisor(self) -> Supervisor:
        """Our launcher, if it started this very process; else nobody, as long as none has come."""
        return self.launcher or SingleProcess()

    @property
    def launcher(self) -> LauncherLink | None:
        """Our launcher, if it started this very process."""
        with self._lock:
            if self._link is None and has_launcher():
                self._link = _link()
            return self._link

    @property
    def world(self) -> World:
        """This worker's place, whatever a pass is told of it."""
        link = self.launcher
        return link.world if link is not None else self.held or world()

    def tell_device(self, name: str, model: str) -> None:
        """Tell our launcher what this worker computes on, where it has given GPUs to workers.

        Args:
            name: as torch names it.
            model: of a GPU; empty for the CPU.
        """
        if WORKERS_PER_GPU_VARIABLE in os.environ:
            self.supervisor.tell(ComputesOn(name, model))

    def rendezvous(self, timeout_s: float | None = None) -> Rendezvous:
        """Find the other workers of the job. Collective the first time: every rank calls it.

        Args:
            timeout_s: how long the last one may take; by default what :mod:`unisono.timeouts` says.

        Raises:
            ValueError: the environment does not say clearly who this worker is, or where rank 0 is.
            RuntimeError: a worker has started this process.
            RendezvousError: the workers cannot find each other.
            WaitTimeoutError: somebody did not come in time.
            PeerLostError: somebody came and left before all were there.
        """
        from unisono.workers.rendezvous import of_launcher

        link = self.launcher
        here = self.world
        with self._lock:
            if here not in self._met:
                self._met[here] = self._meet(here, timeout_s) if link is None else of_launcher(link)
            return self._met[here]

    def _meet(self, here: World, timeout_s: float | None) -> Rendezvous:
        from unisono.workers.admission import refuse_children
        from unisono.workers.rendezvous import meet

        # Ranks that a program starts itself are told where to meet.
        if here.world_size > 1 and not os.environ.get("MASTER_PORT"):
            refuse_children(here)
        return meet(here, os.environ, RENDEZVOUS.in_s() if timeout_s is None else timeout_s)

    def team(self) -> Team:
        """Join the workers, as :meth:`join` does."""
        return self.join().team

    def join(self) -> JointCalls:
        """Join the workers among whom this process was started, or be a team of one.

        Under another launcher than ours: collective, every rank calls it; waits for all of them the
        first time.

        Returns:
            The team, and what it does together; the same for all runs of a process, but a team of
            one is another one for each.

        Raises:
            ValueError: the environment does not say clearly who this worker is, or torch's process
                group has more ranks than that says.
            RuntimeError: this process cannot be one of the workers, or does not know the others.
            RendezvousError: the workers cannot find each other.
            WaitTimeoutError: somebody did not come in time.
            PeerLostError: somebody came and left before all were there.
        """
        # Whoever only starts a job does not wait for these.
        from unisono.workers.admission import (
            refuse_children,
            refuse_larger_group,
            refuse_spawned,
        )
        from unisono.workers.external import ExternallyLaunched
        from unisono.workers.joint_calls import JointCalls
        from unisono.workers.team import Team

        link = self.launcher
        here = self.world
        if link is None and here.world_size > 1:
            refuse_children(here)
        refuse_larger_group(here)
        refuse_spawned(here)
        if link is None and here.world_size == 1:
            return JointCalls(Team(SingleProcess(here)))
        with self._lock:
            if here not in self._joined:
                supervisor = link or ExternallyLaunched.meet(self.rendezvous(), here)
                if link is not None:
                    link.control.take_seat(here.rank)
                    link.connect()
                faults = Faults.from_environment(os.environ, here.rank, supervisor.incarnation)
                self._joined[here] = JointCalls(Team(supervisor, faults))
            return self._joined[here]


def _link() -> LauncherLink:
    if HOSTS_VARIABLE not in os.environ:
        return LauncherLink()
    from unisono.workers.host_member import HostMember

    return HostMember()


def context() -> Context:
    """Give the context of this process, always the same; a fork has one of its own."""
    return per_process(Context)
