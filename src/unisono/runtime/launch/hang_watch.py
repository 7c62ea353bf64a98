"""Is a wait too long, and how is it explained? Checks twice a second.

    control block, /proc ──► who waits, and for how long ──► too long? ──► a thread inspects all
                                                                           processes (`hangs`)
    the user ◄── one message ◄── is it still the same wait? ◄──────────────┘

It never ends a worker: that is the task of ``stall_watch``. It never waits for a worker or a disk.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import final

from unisono.runtime.hangs.explanation import Hang, explain
from unisono.runtime.hangs.whereabouts import RankNotes, inspect_ranks, notes_of
from unisono.runtime.notices import listed
from unisono.runtime.procfs import thread_time_ns
from unisono.runtime.workers.control_block import ControlBlock

LOOK_EVERY_S = 0.5
_WHILE_LOOKING_S = 0.05
_SHOWN_AFTER_S = 1.0  # as workers.waiting
_QUIET_BELOW = 0.01  # of the time between two checks
_ANSWER_WITHIN_S = 6.0
_LEAST_S, _FACTOR, _REMEMBERED = 3.0, 10.0, 101


def long_s(durations: Collection[float]) -> float:
    """Return the seconds after which something takes too long, from its previous durations."""
    return max(_LEAST_S, _FACTOR * statistics.median(durations or [0.0]))


@dataclass(frozen=True, slots=True)
class Scene:
    """The workers of a job at one moment."""

    pids: Mapping[int, int]  # of the workers whose program has not ended, by rank
    members: Collection[int]  # the ranks that compute together
    ended: tuple[int, ...] = ()  # ranks whose process has ended and is not replaced


@dataclass(slots=True)
class _Observation:
    """The last observation of a rank: what it does, and since when."""

    mark: tuple[object, ...]
    since_s: float
    ran_ns: int
    quiet_since_s: float


@dataclass(frozen=True, slots=True)
class _Wait:
    key: tuple[object, ...]
    waited_s: float
    long_s: float
    usual_s: float | None


@final
class HangWatch:
    """Watches the workers of one job for waits that are too long."""

    def __init__(self, control: ControlBlock, folder: str, say: Callable[[str], None]) -> None:
        self._control, self._folder, self._say = control, folder, say
        self._observations: dict[int, _Observation] = {}
        # The seconds that recent steps took, and recent pauses of ranks without processor time.
        self._steps, self._quiets = (deque[float](maxlen=_REMEMBERED) for _ in range(2))
        self._step: tuple[int, float] | None = None
        self._said_at_s = 0.0  # how long the wait had lasted at the last message
        self._key: tuple[object, ...] = ()
        self._answer: _Answer | None = None
        self._looked_at_s = time.monotonic()
        self._has_failed = False

    @property
    def due_s(self) -> float:
        """When to call :meth:`poll` next, as a ``time.monotonic`` value."""
        if self._has_failed:
            return math.inf
        return self._looked_at_s + (_WHILE_LOOKING_S if self._answer else LOOK_EVERY_S)

    def poll(self, scene: Scene) -> None:
        """Check the workers if it is time, and report long waits. Never raises."""
        now_s = time.monotonic()
        if now_s < self.due_s:
            return
        try:
            self._look(scene, now_s)
        except Exception as error:  # an explanation must not end a run
            self._has_failed = True
            self._say(f"waits cannot be explained any more: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Wait until a running explanation has ended."""
        if self._answer is not None:
            self._answer.join(_ANSWER_WITHIN_S)

    def _look(self, scene: Scene, now_s: float) -> None:
        slept_s = now_s - self._looked_at_s - LOOK_EVERY_S
        self._looked_at_s = now_s
        if slept_s > LOOK_EVERY_S:
            self._observations.clear()  # the launcher itself was paused, and perhaps the machine
            self._step = None
        notes = notes_of(self._control, [r for r in scene.members if r in scene.pids])
        self._note_step(notes, now_s)
        wait = self._longest(scene, notes, now_s)
        if wait is None or wait.key != self._key:
            self._said_at_s = 0.0
        self._key = () if wait is None else wait.key
        answer = self._answer
        if answer is None:
            if wait is not None and wait.waited_s >= max(wait.long_s, 2 * self._said_at_s):
                self._said_at_s = wait.waited_s
                hang = Hang(wait.waited_s, wait.usual_s, self._folder, scene.ended)
                answer = _Answer(wait.key, scene, notes, hang)
                answer.start()  # may raise: then there is none to wait for
                self._answer = answer
        elif not answer.is_alive():
            self._answer = None
            if answer.key == self._key and answer.text:
                again = f"`unisono where {os.getpid()}` shows where every rank is, at any time."
                self._say(f"{answer.text}\n  {again}")

    def _note_step(self, notes: Mapping[int, RankNotes], now_s: float) -> None:
        begun = max((self._control.lines[rank].begun for rank in notes), default=0)
        if not begun:
            self._step = None
            return
        # No step had begun at the last check, so finished steps have taken no longer.
        before, since_s = self._step or (1, now_s - LOOK_EVERY_S)
        if begun > before:
            self._steps.append((now_s - since_s) / (begun - before))
        if begun != before or self._step is None:
            self._step = begun, now_s

    def _longest(self, scene: Scene, notes: Mapping[int, RankNotes], now_s: float) -> _Wait | None:
        self._observations = {
            rank: self._see(rank, pid, notes.get(rank), now_s) for rank, pid in scene.pids.items()
        }
        if not self._observations:
            return None
        told = [seen for seen in self._observations.values() if seen.mark[0]]
        if told:
            first = min(told, key=lambda seen: seen.since_s)
            usual_s = statistics.median(self._steps) if self._steps else None
            return _Wait(first.mark, now_s - first.since_s, long_s(self._steps), usual_s)
        if any(one.step is not None for one in notes.values()):
            return self._slow_step(now_s)
        quiet_since_s = min(seen.quiet_since_s for seen in self._observations.values())
        return _Wait(("quiet", quiet_since_s), now_s - quiet_since_s, long_s(self._quiets), None)

    def _slow_step(self, now_s: float) -> _Wait | None:
        """Treat the current step as a wait; the first step only once all ranks are idle."""
        if self._step is None:
            return None
        step, since_s = self._step
        if not self._steps:
            since_s = max(since_s, *(seen.quiet_since_s for seen in self._observations.values()))
        usual_s = statistics.median(self._steps) if self._steps else None
        return _Wait(("step", step), now_s - since_s, long_s(self._steps), usual_s)

    def _see(self, rank: int, pid: int, notes: RankNotes | None, now_s: float) -> _Observation:
        line = self._control.lines[rank]
        told = (notes and (notes.shown_wait or notes.meeting)) or ""
        mark = (told, pid, line.arrivals, line.begun, self._control.wait_of(rank)[0])
        ran_ns = thread_time_ns(pid)
        seen = self._observations.get(rank)
        if seen is None or seen.mark != mark:
            late_s = _SHOWN_AFTER_S if notes and notes.shown_wait else 0.0
            quiet_since_s = now_s if seen is None or seen.mark[1] != pid else seen.quiet_since_s
            seen = _Observation(
                mark, now_s - late_s, seen.ran_ns if seen else ran_ns, quiet_since_s
            )
        if ran_ns - seen.ran_ns > _QUIET_BELOW * LOOK_EVERY_S * 1e9:
            quiet_s = now_s - seen.quiet_since_s - 2 * LOOK_EVERY_S
            self._quiets.append(max(0.0, quiet_s))
            seen.quiet_since_s = now_s
        seen.ran_ns = ran_ns
        return seen


class _Answer(threading.Thread):
    """An inspection of all processes; `text` explains the wait `key`, or is empty."""

    def __init__(
        self, key: tuple[object, ...], scene: Scene, notes: Mapping[int, RankNotes], hang: Hang
    ) -> None:
        super().__init__(name="unisono-hangs", daemon=True)
        self.key, self.text = key, ""
        self._scene, self._notes, self._hang = scene, notes, hang

    def run(self) -> None:
        try:
            self.text = explain(inspect_ranks(self._scene.pids, self._notes), self._hang)
        except Exception as error:  # an explanation must not end a run
            ranks = listed("rank", sorted(self._scene.pids), " and ")
            self.text = f"where {ranks} wait cannot be seen: {type(error).__name__}: {error}"
