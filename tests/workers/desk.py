"""Ranks as threads that can die, and somebody who plays their launcher.

The desk decides as the real one does, by ``recovery.decide``, and acts on a real control; threads
stand for processes. A rank dies where a table says::

    Death(rank=2, meeting=3, moment="posting")   its message for that meeting is torn
    Death(rank=2, meeting=3, moment="before")    it does not come to its third meeting
    Death(rank=2, meeting=3, moment="after")     it has come, and does nothing any more
    Death(rank=2, meeting=3, moment="stopping")  it misses somebody, there or later, and dies
    Death(rank=2, meeting=3, moment="stopped")   the same, but it has told the desk already
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.launch import job_events, recovery
from unisono.workers.control_block import ControlBlock
from unisono.workers.membership import Membership
from unisono.workers.memory import Memory
from unisono.workers.supervisor import Live, Passed
from unisono.workers.team import Team
from unisono.world import World

ANSWERED_WITHIN_S = 30.0


@dataclass(frozen=True)
class Death:
    rank: int
    meeting: int
    moment: str


MOMENTS = ("posting", "before", "after", "stopping", "stopped")


class Died(BaseException):
    """The thread of a rank ends here, as a killed process would."""


class Desk:
    """Plays the launcher of one job whose workers are threads."""

    def __init__(self, control: ControlBlock, *, replaces: bool = False) -> None:
        state = recovery.start(control.world_size, restarts=1000, replaces=replaces)
        self.state = recovery.decide(state, job_events.Ready()).state
        self.spawn: Callable[[int], None] = lambda rank: None
        self.gave_up: list[str] = []
        self._page = control
        self._answers: dict[int, job_events.Answer] = {}
        self._memories: dict[int, Memory] = {}
        self._changed = threading.Condition(threading.RLock())

    def take(self, event: job_events.Event) -> None:
        with self._changed:
            decision = recovery.decide(self.state, event)
            self.state = decision.state
            for action in decision.actions:
                self._act(action)
            self._changed.notify_all()

    def ask(self, rank: int, event: job_events.Event) -> job_events.Answer:
        with self._changed:
            self.take(event)
            answered = self._changed.wait_for(lambda: rank in self._answers, ANSWERED_WITHIN_S)
            assert answered, f"rank {rank} was never answered: {self.state}"
            return self._answers.pop(rank)

    def memory(self, key: int, num_bytes: int) -> Memory:
        with self._changed:
            return self._memories.setdefault(key, Memory.private(num_bytes))

    def lose(self, rank: int) -> None:
        with self._changed:
            self._answers.pop(rank, None)
            self.take(job_events.Lost(rank, now=0.0))

    def _act(self, action: job_events.Action) -> None:
        match action:
            case job_events.Seat(rank, arrivals):
                self._page.come_back(rank, arrivals)
            case job_events.MarkDeparture(rank, how):
                self._page.leave(rank, how)
            case job_events.Answer(rank):
                self._answers[rank] = action
            case job_events.Wish(value):
                self._page.wish = value
            case job_events.Spawn(rank):
                self.spawn(rank)


class DeskHost:
    """The desk as one rank sees it: a :class:`unisono.workers.supervisor.Supervisor`."""

    can_replace = True

    def __init__(self, desk: Desk, rank: int, dies: Callable[[str], None]) -> None:
        self._desk, self._rank, self._dies = desk, rank, dies

    def note_ready(self) -> None:
        self._desk.take(job_events.Ready())

    def memory(self, key: int, num_bytes: int) -> Memory:
        return self._desk.memory(key, num_bytes)

    def stopped(self, arrivals: int, *, between_steps: bool) -> Membership:
        self._dies("stopping")
        event = job_events.Stopped(self._rank, arrivals, between_steps)
        try:
            self._dies("stopped")
        except Died:
            self._desk.take(event)
            raise
        return Membership.from_json(self._desk.ask(self._rank, event).header["membership"])

    def entry(self, index: int, name: str) -> Passed | Live:
        answer = self._desk.ask(self._rank, job_events.Asked(self._rank, index, name))
        told = answer.header
        if told["type"] == "passed":
            return Passed(answer.payload, told["loop"])
        assert told["type"] == "live", told
        membership = Membership.from_json(told["membership"])
        return Live(membership, told["loop"], told["is_alone"])

    def note_result(self, index: int, name: str, payload: bytes) -> None:
        self._desk.take(job_events.Came(index, name, payload))

    def note_loop(self, index: int, facts: dict[str, Any]) -> None:
        self._desk.take(job_events.LoopBegan(index, facts))

    def note_end_of_loop(self, index: int, payload: bytes) -> None:
        self._desk.take(job_events.Came(index, "loop", payload))

    def give_up_recovery(self, reason: str) -> None:
        self._desk.take(job_events.Unready(reason))

    def remove_at_end(self, path: Path) -> None:
        raise AssertionError("no team of threads makes files")

    def leave(self, path: Path) -> None:
        raise AssertionError("no team of threads makes files")


class Job:
    """Runs ``work(team)`` in a thread a rank, kills them, and replaces them if it is to."""

    def __init__(
        self, control: ControlBlock, deaths: Iterable[Death] = (), *, replaces: bool = False
    ) -> None:
        self.desk = Desk(control, replaces=replaces)
        self.desk.spawn = lambda rank: self._start(rank, is_replacement=True)
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
        control = ControlBlock.attach(os.dup(self._page.fd), self._page.world_size)
        self._pages.append(control)
        dies = _mortal(control, rank, deaths)
        world = World(rank, self._page.world_size, rank, self._page.world_size)
        host = DeskHost(self.desk, rank, dies)
        team = Team(world, control, host, is_replacement=is_replacement)
        thread = threading.Thread(target=self._live, args=(rank, team))
        self._threads.append(thread)
        thread.start()

    def _live(self, rank: int, team: Team) -> None:
        try:
            self.results[rank] = self._work(team)
        except Died:
            self.desk.lose(rank)
        except Exception as error:
            self.results[rank] = error


def _mortal(control: ControlBlock, rank: int, deaths: list[Death]) -> Callable[[str], None]:
    """Have this mapping of the control, and whoever asks, end the thread where a death is due."""
    meeting = 1
    arrive, post = control.arrive, control.post

    def dies(moment: str) -> None:
        for death in deaths:
            late = moment in ("stopping", "stopped") and meeting > death.meeting
            if death.moment == moment and (meeting == death.meeting or late):
                raise Died

    def mortal_arrive(rank: int) -> None:
        nonlocal meeting
        dies("before")
        arrive(rank)
        dies("after")
        meeting += 1

    def mortal_post(rank: int, message: bytes) -> None:
        try:
            dies("posting")
        except Died:
            post(rank, message[: len(message) // 2] + b"torn")
            raise
        post(rank, message)

    control.arrive, control.post = mortal_arrive, mortal_post  # type: ignore[method-assign]
    return dies
