"""Times a program's steps, in each worker. ``python -m unisono.forecast.timed_program OPTIONS …``

Every worker notes what its timers say of each step. Rank 0 looks at the clock and names the last
step two steps ahead, in a file: nobody can begin the step after the next before that file is there,
so all leave after the same step. Checkpoints and event files go into a folder that is thrown away.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.plan.samples import SamplePlan
from unisono.step.engine import StepEngine
from unisono.step.shard_passes import ShardPasses
from unisono.train.boundary import Boundary
from unisono.train.run import Run
from unisono.verify.observed import main
from unisono.verify.recorder import Recorder
from unisono.verify.wrapping import wrap
from unisono.workers.launcher_link import STARTED_VARIABLE

STEPS_AT_LEAST = 6
_STEPS_AT_MOST = 5000
_WARM_UP_STEPS, _WARM_UP_S = 10, 1.0
_OF_OTHERS_AT_MOST = 20  # steps of an optimizer before anything of Unisono is seen
_AFTER_RECOVERY = 5
_NOTED_STEPS = range(1, 4)  # whose gradients are noted; none of them is timed


class StepTimes:
    """What a worker notes of its steps. Final.

    Args:
        recorder: writes it down in the end, and ends the program.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last_file = Path(recorder.options.folder) / "last-step"
        self._facts: dict[str, Any] | None = None
        self._plan: SamplePlan | None = None
        self._rows: list[tuple[int, int, bool, list[float]]] = []
        self._ready: dict[int, float] = {}
        self._warm_rows, self._timed_since_s = 0, 0.0
        self._was_short, self._whole_since = False, 0
        self._last: int | None = None
        self._num_plain = 0
        recorder.at_end.append(self._write)

    def install(self) -> None:
        """Put the hooks in place."""
        wrap(Run, "_set_up", self._set_up)
        wrap(Boundary, "__init__", self._begin_loop)
        wrap(Boundary, "count", self._count)
        wrap(ShardPasses, "add", self._differentiate)
        self._plain = register_optimizer_step_post_hook(self._after_plain_step)

    def _after_plain_step(self, *_: Any) -> None:
        """Leave a program that trains without Unisono."""
        self._num_plain += 1
        if self._num_plain >= _OF_OTHERS_AT_MOST:
            self._recorder.stop()

    def _set_up(self, before: Callable[..., None], run: Any, *args: Any) -> None:
        self._plain.remove()
        *others, options = args
        if options.directory is not None:
            options = replace(options, directory=Path(self._recorder.options.folder) / "run")
        before(run, *others, options)

    def _begin_loop(
        self,
        before: Callable[..., None],
        boundary: Boundary,
        run: Any,
        engine: StepEngine,
        plan: SamplePlan,
        *args: Any,
    ) -> None:
        before(boundary, run, engine, plan, *args)
        if len(self._rows) > STEPS_AT_LEAST:
            self._recorder.stop()
        exchange = engine.exchange
        sizes = [p.numel() * p.element_size() for p in exchange.parameters]
        self._plan, self._rows = plan, []
        self._facts = {
            "device": run.device.name,
            "exchange": run.exchange,
            "gradient_bytes": sizes,
            "num_shards": plan.shards,
            "batch_size": plan.batch_size,
            "num_samples": None if plan.is_endless else plan.num_samples,
            "startup_s": time.time() - float(os.environ[STARTED_VARIABLE]),
        }

    def _count(self, before: Callable[..., None], boundary: Boundary, *args: Any) -> None:
        position = boundary._kept.position
        step, batch = position.step, position.batch
        before(boundary, *args)
        assert self._plan is not None
        team_size = boundary.run.team.size
        is_full = self._plan.num_batch_samples(batch) == self._plan.batch_size
        self._rows.append((step, team_size, is_full, boundary.engine.timers.times))
        if self._recorder.rank == 0 and self._last is None and self._is_enough(team_size):
            beside = self._last_file.with_suffix(".part")
            beside.write_text(str(step + 2))
            beside.replace(self._last_file)
        if self._last is None and self._last_file.exists():
            self._last = int(self._last_file.read_text())
        if self._last is not None and step >= self._last:
            self._recorder.stop()

    def _is_enough(self, team_size: int) -> bool:
        """Tell on rank 0 whether enough steps were timed, or a lost worker has come back."""
        now_s, number = perf_counter(), len(self._rows)
        if team_size < self._recorder.world_size:
            self._was_short, self._whole_since = True, 0
        elif self._was_short:
            self._whole_since += 1
            return self._whole_since >= _AFTER_RECOVERY
        if not self._warm_rows:
            lasted_s = now_s - self._rows[0][3][0]
            is_warm = number >= _WARM_UP_STEPS or lasted_s >= _WARM_UP_S
            if number > len(_NOTED_STEPS) and is_warm:
                self._warm_rows, self._timed_since_s = number, now_s
            return False
        is_long = now_s - self._timed_since_s >= self._recorder.options.timing_s
        num_timed = number - self._warm_rows
        return (is_long and num_timed >= STEPS_AT_LEAST) or num_timed >= _STEPS_AT_MOST

    def _differentiate(
        self,
        before: Callable[..., Any],
        passes: ShardPasses,
        shard: int,
        *args: Any,
    ) -> Any:
        """Note when each parameter gets its gradient in the last backward pass of a step."""
        is_noted = len(self._rows) in _NOTED_STEPS and shard == passes.home.stack.last_shard
        if not is_noted:
            return before(passes, shard, *args)
        at_s: dict[int, float] = {}

        def note(index: int, _: torch.Tensor) -> None:
            at_s[index] = perf_counter()

        parameters = passes.home.parameters
        hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(note, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        begun_s = perf_counter()
        try:
            finished = before(passes, shard, *args)
        finally:
            lasted_s = perf_counter() - begun_s
            for hook in hooks:
                hook.remove()
        self._ready = {index: (seen - begun_s) / lasted_s for index, seen in at_s.items()}
        return finished

    def _write(self) -> None:
        if self._facts is not None:
            ready = [self._ready.get(at, 1.0) for at in range(len(self._facts["gradient_bytes"]))]
            facts = {**self._facts, "ready": ready, "warm_rows": self._warm_rows}
            self._recorder.write("timed", facts=facts, rows=self._rows)


def install_timers(recorder: Recorder) -> None:
    """Have a program's steps timed."""
    StepTimes(recorder).install()


if __name__ == "__main__":
    main(install_timers)
