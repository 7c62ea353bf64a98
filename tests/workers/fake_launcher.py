"""Ranks as threads that can die, and somebody who plays their launcher.

The launcher decides as the real one does, by ``recovery``, and acts on a real control; threads
stand for processes. A rank dies where a table says::

    Death(rank=2, meeting=3, moment="posting")   its message for that meeting is torn
    Death(rank=2, meeting=3, moment="before")    it does not come to its third meeting
    Death(rank=2, meeting=3, moment="after")     it has come, and does nothing any more
    Death(rank=2, meeting=3, moment="stopping")  it misses somebody, there or later, and dies
    Death(rank=2, meeting=3, moment="stopped")   the same, but it has told the launcher already
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from unisono.runtime.launch import recovery
from unisono.runtime.procfs import create_memory
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.launcher_messages import (
    CatchUp,
    Continue,
    Live,
    Notification,
    Passed,
    Ready,
    Stopped,
    ToWorker,
)
from unisono.runtime.workers.membership import Membership
from unisono.runtime.workers.memory import Memory
from unisono.runtime.workers.supervisor import Gather, Supervisor
from unisono.runtime.workers.team import Team
from unisono.runtime.world import World

ANSWERED_WITHIN_S = 30.0


@dataclass(frozen=True)
class Death:
    rank: int
    meeting: int
    moment: str


MOMENTS = ("posting", "before", "after", "stopping", "stopped")


class Died(BaseException):
    """The thread of a rank ends here, as a killed process would."""


class FakeLauncher:
    """Plays the launcher of one job whose workers are threads."""

    def __init__(self, control: ControlBlock, *, replaces: bool = False) -> None:
        size = control.world_size
        state = recovery.RecoveryState(
            Membership.of(size), world_size=size, restarts=1000, replaces=replaces
        )
        self.state = recovery.received(state, 0, Ready()).state
        self.spawn: Callable[[int], None] = lambda rank: None
        self.gave_up: list[str] = []
        self._page = control
        self._answers: dict[int, ToWorker] = {}
        self._memories: dict[int, Memory] = {}
        self._changed = threading.Condition(threading.RLock())

    def take(self, rank: int, message: recovery.OfRecovery) -> None:
        self._do(partial(recovery.received, rank=rank, message=message))

    def _do(self, decide: Callable[[recovery.RecoveryState], recovery.RecoveryDecision]) -> None:
        with self._changed:
            decision = decide(self.state)
            self.state = decision.state
            for action in decision.actions:
                self._act(action)
            self._changed.notify_all()

    def ask(self, rank: int, message: Stopped | CatchUp) -> ToWorker:
        with self._changed:
            self.take(rank, message)
            answered = self._changed.wait_for(lambda: rank in self._answers, ANSWERED_WITHIN_S)
            assert answered, f"rank {rank} was never answered: {self.state}"
            return self._answers.pop(rank)

    def memory(self, key: int, num_bytes: int) -> Memory:
        with self._changed:
            if key not in self._memories:
                fd = create_memory("launcher", num_bytes)
                self._memories[key] = Memory.map(fd, num_bytes)
                os.close(fd)
            return self._memories[key]

    def lose(self, rank: int) -> None:
        with self._changed:
            self._answers.pop(rank, None)
            self._do(partial(recovery.lost, rank=rank, now=0.0))

    def _act(self, action: recovery.Action) -> None:
        match action:
            case recovery.Seat(rank, arrivals):
                self._page.mark_replaced(rank, arrivals)
            case recovery.MarkDeparture(rank, how):
                self._page.leave(rank, how)
            case recovery.Answer(rank, message):
                self._answers[rank] = message
            case recovery.Wish(value):
                self._page.head.wish = value
            case recovery.Spawn(rank):
                self.spawn(rank)


class FakeSupervisor(Supervisor):
    """The launcher as one rank sees it."""

    can_replace = True

    def __init__(
        self,
        launcher: FakeLauncher,
        rank: int,
        control: ControlBlock,
        dies: Callable[[str], None] = lambda moment: None,
        incarnation: int = 0,
    ) -> None:
        self.world = World(rank, control.world_size, rank, control.world_size)
        self.control = control
        self.incarnation, self.is_replacement = incarnation, incarnation > 0
        self._launcher, self._dies = launcher, dies

    def notify(self, message: Notification) -> None:
        if isinstance(sys.exception(), Died):
            return  # who is dead says nothing
        self._launcher.take(self.world.rank, message)  # type: ignore[arg-type]

    def memory(self, key: int, num_bytes: int, gather: Gather) -> Memory:
        return self._launcher.memory(key, num_bytes)

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        self._dies("stopping")
        stopped = Stopped(arrivals, between_steps)
        try:
            self._dies("stopped")
        except Died:
            self._launcher.take(self.world.rank, stopped)
            raise
        answer = self._launcher.ask(self.world.rank, stopped)
        assert isinstance(answer, Continue), answer
        return answer.membership

    def catch_up(self, index: int, name: str) -> Passed | Live:
        answer = self._launcher.ask(self.world.rank, CatchUp(index, name))
        assert isinstance(answer, Passed | Live), answer
        return answer


class Job:
    """Runs ``work(team)`` in a thread a rank, kills them, and replaces them if it is to."""

    supervisor: type[FakeSupervisor] = FakeSupervisor

    def __init__(
        self, control: ControlBlock, deaths: Iterable[Death] = (), *, replaces: bool = False
    ) -> None:
        self.launcher = FakeLauncher(control, replaces=replaces)
        self.launcher.spawn = lambda rank: self._start(rank, is_replacement=True)
        self.results: dict[int, Any] = {}
        self._page = control
        self._deaths = list(deaths)
        self._pages: list[ControlBlock] = []
        self._threads: list[threading.Thread] = []
        self._work: Callable[[Team], Any] = lambda team: None

    def run(self, work: Callable[[Team], Any]) -> dict[int, Any]:
        """Return what those ranks that lived to the end returned or raised."""
        self._work = work
        for rank in range(self._page.world_size):
            self._start(rank, is_replacement=False)
        for thread in self._threads:  # grows while replacements are started
            thread.join()
        for control in self._pages:
            control.close()
        return self.results

    def _start(self, rank: int, *, is_replacement: bool) -> None:
        deaths = [] if is_replacement else [one for one in self._deaths if one.rank == rank]
        control = ControlBlock(os.dup(self._page.fd), self._page.world_size)
        self._pages.append(control)
        dies = _Mortal(control, deaths)
        team = Team(self.supervisor(self.launcher, rank, control, dies, int(is_replacement)))
        team._barrier.arrive = partial(dies.arrive, team._barrier.arrive)  # type: ignore[method-assign]
        thread = threading.Thread(target=self._live, args=(rank, team))
        self._threads.append(thread)
        thread.start()

    def _live(self, rank: int, team: Team) -> None:
        try:
            self.results[rank] = self._work(team)
        except Died:
            self.launcher.lose(rank)
        except Exception as error:
            self.results[rank] = error


class _Mortal:
    """Has a rank's thread end where a death is due."""

    def __init__(self, control: ControlBlock, deaths: list[Death]) -> None:
        self._deaths = deaths
        self._meeting = 1
        control.post = partial(self._post, control.post)  # type: ignore[method-assign]

    def __call__(self, moment: str) -> None:
        for death in self._deaths:
            late = moment in ("stopping", "stopped") and self._meeting > death.meeting
            if death.moment == moment and (self._meeting == death.meeting or late):
                raise Died

    def arrive(self, arrive: Callable[[str], None], purpose: str) -> None:
        self("before")
        arrive(purpose)
        self("after")
        self._meeting += 1

    def _post(self, post: Callable[[int, bytes], None], rank: int, message: bytes) -> None:
        try:
            self("posting")
        except Died:
            post(rank, message[: len(message) // 2] + b"torn")
            raise
        post(rank, message)
