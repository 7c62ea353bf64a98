"""Watches on the leader what a loop's steps cost, and why they are not faster.

All workers tell each other their times after every step, on the control block. The leader looks at
windows of consecutive steps and rests in between, when nobody looks for delays either, so that
watching costs next to nothing::

    steps     warm-up │ window │ window │ rest … │ window │ rest … │ window
    judged                     ↑        ↑ the second one like the first: it is told

Invariant: nothing that fails here ends the run; then it is watched no more.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from unisono.machine_load import LoadWatch, MachineLoad
from unisono.notices import say
from unisono.train.boundary import Boundary
from unisono.train.confirmation import Confirmed
from unisono.train.loop_plan import LoopPlan
from unisono.train.mixed_devices import SPEEDS
from unisono.train.run_context import RunContext
from unisono.train.slowdown import Slowdown, SpeedReport
from unisono.train.slowness import judge
from unisono.train.step_window import StepWindow, ToldStep, times_of
from unisono.world import threads_per_worker

WARMUP_STEPS = 10
WINDOW_STEPS = 64
_FEW_STEPS, _LONG_S = 20, 20.0  # of a window whose steps take long
_REST_AT_LEAST_S, _REST_AT_MOST_S = 5.0, 30.0  # else a tenth of what the loop has lasted
_LAST_AT_LEAST = WINDOW_STEPS // 2
_UNTIL_ALL_LOOK = 2  # steps: a plan is made in one and read at the end of it


class SpeedWatch:
    """Watches the steps of one loop. Final.

    Args:
        run: whose loop it is.
        boundary: what lies between its steps.
        plan: what it goes over.
        clock: seconds, as the timers of steps count them.
    """

    def __init__(
        self,
        run: RunContext,
        boundary: Boundary,
        plan: LoopPlan,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._run, self._boundary, self._plan, self._clock = run, boundary, plan, clock
        self._engine, self._team = boundary.engine, run.team
        self._load = LoadWatch(clock)
        self._machine: MachineLoad | None = None
        self._confirmed = Confirmed()
        self._rows: list[ToldStep] = []
        self._newest, self._since = -2, (-1, -1)
        self._is_full = self._has_begun = self._is_broken = False
        self._to_skip = WARMUP_STEPS
        self._begun_s = self._rests_until_s = 0.0
        self._judged_step = 0

    def after_step(self, num_samples: int) -> None:
        """Look at the step before the one that has just been done, which all have told of.

        Args:
            num_samples: of the step that has been done.
        """
        was_full, self._is_full = self._is_full, num_samples == self._plan.samples.batch_size
        if not self._team.is_leader or self._is_broken:
            return
        if not self._has_begun:
            self._attempt(self._begin)
        if self._to_skip > 0:
            self._to_skip -= 1
        elif self._engine.timers.times[0] >= self._rests_until_s:
            if self._boundary.is_watched:
                self._attempt(lambda: self._take(was_full))
            else:
                self._boundary.is_watched, self._to_skip = True, _UNTIL_ALL_LOOK

    def finish(self) -> None:
        """Say what has cost time in the whole loop, once it is over."""
        if self._team.is_leader and self._has_begun and not self._is_broken:
            self._attempt(self._conclude)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._is_broken = True
            say(f"nobody watches any more why steps are slow ({type(error).__name__}: {error}).")

    def _begin(self) -> None:
        self._has_begun = True
        self._begun_s, self._judged_step = self._clock(), self._run.kept.position.step
        self._look_at_machine()

    def _take(self, was_full: bool) -> None:
        """Take one step in, and judge the window if it is full."""
        run, team = self._run, self._team
        step = run.kept.position.step - 2
        since = (team.membership.generation, len(run.kept.last.get(SPEEDS, ())))
        told = [team.times(rank, step) for rank in team.membership.ranks]
        times = [one for one in told if one is not None]
        if step != self._newest + 1 or since != self._since or len(times) < len(told):
            self._rows = []
        self._newest, self._since = step, since
        if len(times) < len(told):
            return
        self._rows.append((times, was_full))
        now_s = self._engine.timers.times[0]
        lasted_s, num_steps = now_s - self._rows[0][0][0][0], len(self._rows) - 1
        if num_steps >= WINDOW_STEPS or (num_steps >= _FEW_STEPS and lasted_s >= _LONG_S):
            self._judge()
            self._tell(self._confirmed.now(self._lasted_s), is_final=False)
            if self._confirmed.num_windows > 1:
                rest_s = min(max(self._lasted_s / 10, _REST_AT_LEAST_S), _REST_AT_MOST_S)
                self._rests_until_s = now_s + max(rest_s - lasted_s, 0.0)
                self._boundary.is_watched = False

    def _judge(self) -> None:
        """Judge a window of steps, and what it stands for: all since the one before."""
        self._look_at_machine()
        window, self._rows = self._window(), []
        step = self._run.kept.position.step
        num_steps, self._judged_step = max(step - self._judged_step, 0), step
        self._confirmed.add(judge(window), num_steps)

    def _conclude(self) -> None:
        if len(self._rows) > _LAST_AT_LEAST:
            self._judge()
        self._tell(self._confirmed.over_all(self._lasted_s), is_final=True)

    def _tell(self, findings: tuple[Slowdown, ...], *, is_final: bool) -> None:
        machine, boundary = self._machine, self._boundary
        facts = {
            "seconds": round(self._lasted_s, 6),
            "snapshots_s": round(boundary.snapshots_s, 6),
            "disk_s": round(boundary.disk_s, 6),
            "machine": None if machine is None else machine.as_json,
        }
        self._run.observer.note_speed(SpeedReport(findings, facts, is_final))

    @property
    def _lasted_s(self) -> float:
        return self._clock() - self._begun_s

    def _look_at_machine(self) -> None:
        pids = [self._team.pid(rank) for rank in self._team.neighbours]
        self._machine = self._load.look([pid for pid in pids if pid is not None])

    def _window(self) -> StepWindow:
        run, exchange = self._run, self._engine.exchange
        ranks, hosts = self._team.membership.ranks, self._team.hosts
        parts_of = exchange.division.parts_of
        speeds = run.kept.last.get(SPEEDS)
        return StepWindow(
            ranks,
            times_of(self._rows),
            tuple(sum(part.hi - part.lo for part in parts_of[rank]) for rank in ranks),
            self._plan.samples.batch_size,
            () if speeds is None else tuple(speeds[str(rank)] for rank in ranks),
            None if exchange.have_all else self._team.membership.leader,
            self._machine,
            threads_per_worker() > 1,
            run.device.is_host,
            int(self._plan.reading.loader_workers),
            tuple(at for at, host in enumerate(hosts) for _ in host) if len(hosts) > 1 else (),
        )
