"""Times a program's steps, in each worker. ``python -m unisono.tools.plan.timed_program OPTIONS …``

Rank 0 watches the clock and writes the last step's number, two steps ahead, to a file: no worker
can begin the step after the next before that file exists, so all leave after the same step.
Checkpoints and event files go to a folder that is deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, final

from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.engine.exchange.shared_optimizer_state import plan_state
from unisono.engine.state.contents import updated_parameters
from unisono.engine.state.optimizers import is_elementwise
from unisono.plan.samples import SamplePlan
from unisono.tools.verify.observed import main
from unisono.tools.verify.recorder import Recorder, wrap
from unisono.tools.verify.trace import Note
from unisono.training.boundary import Boundary
from unisono.training.run import Run

_STEPS_AT_LEAST, _STEPS_AT_MOST = 6, 5000
_WARM_UP_STEPS, _WARM_UP_S = 10, 1.0
_OF_OTHERS_AT_MOST = 20  # optimizer steps without any use of Unisono


@final
class StepTimes:
    """Records the times of a worker's steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last_file = Path(recorder.options.folder) / "last-step"
        self._facts: dict[str, Any] = {}
        self._plan: SamplePlan | None = None
        self._rows: list[tuple[int, bool, list[float]]] = []
        self._begun_s = self._ended_s = self._timed_since_s = 0.0
        self._warm_rows = 0
        self._last: int | None = None
        self._num_plain = 0
        recorder.at_end.append(self._write)

    def install(self) -> None:
        """Install the hooks."""
        wrap(Run, "__init__", self._make_run)
        wrap(Boundary, "__init__", self._begin_loop)
        wrap(Boundary, "count", self._count)
        self._plain = register_optimizer_step_post_hook(self._after_plain_step)

    def _after_plain_step(self, *_: Any) -> None:
        """Stop a program that trains without Unisono."""
        self._num_plain += 1
        if self._num_plain >= _OF_OTHERS_AT_MOST:
            self._recorder.stop()

    def _make_run(self, before: Callable[..., None], run: Any, *args: Any, **given: Any) -> None:
        self._plain.remove()
        if given.get("directory") is not None:
            given["directory"] = Path(self._recorder.options.folder) / "run"
        before(run, *args, **given)

    def _begin_loop(self, before: Callable[..., None], boundary: Boundary, *args: Any) -> None:
        before(boundary, *args)
        run, engine, plan, *_ = args
        if len(self._rows) > _STEPS_AT_LEAST:
            self._recorder.stop()
        self._plan, self._rows, self._warm_rows = plan, [], 0
        self._begun_s = self._ended_s = perf_counter()
        optimizer = run.kept.optimizer
        updated = updated_parameters(engine.model, optimizer)
        states = plan_state(optimizer, updated)[1] if is_elementwise(optimizer) else {}
        self._facts = {
            "device": run.device.name,
            "gradient_bytes": sum(parameter.nbytes for parameter in updated.values()),
            "state_bytes": sum(tensor.nbytes for tensor in states.values()),
            "num_shards": plan.shards,
            "batch_size": plan.batch_size,
            "num_samples": None if plan.is_endless else plan.num_samples,
        }

    def _count(self, before: Callable[..., None], boundary: Boundary, *args: Any) -> None:
        position = boundary._kept.position
        step, batch = position.step, position.batch
        assert self._plan is not None
        plan = self._plan.at(position.epoch)
        before(boundary, *args)
        is_full = plan.cuts is not None or plan.num_batch_samples(batch) == plan.batch_size
        begun_s, *phases = boundary.engine.timers.times
        self._rows.append((step, is_full, [begun_s - self._ended_s, *phases]))
        self._ended_s = begun_s + sum(phases)
        if self._recorder.rank == 0 and self._last is None and self._is_enough():
            beside = self._last_file.with_suffix(".part")
            beside.write_text(str(step + 2))
            beside.replace(self._last_file)
        if self._last is None and self._last_file.exists():
            self._last = int(self._last_file.read_text())
        if self._last is not None and step >= self._last:
            self._recorder.stop()

    def _is_enough(self) -> bool:
        now_s, number = perf_counter(), len(self._rows)
        if not self._warm_rows:
            is_long = number > _STEPS_AT_LEAST and now_s - self._begun_s >= _WARM_UP_S
            if is_long or number >= _WARM_UP_STEPS:
                self._warm_rows, self._timed_since_s = number, now_s
            return False
        timed_s, num_timed = now_s - self._timed_since_s, number - self._warm_rows
        is_long = timed_s >= self._recorder.options.timing_s and num_timed >= _STEPS_AT_LEAST
        return is_long or num_timed >= _STEPS_AT_MOST

    def _write(self) -> None:
        if self._facts:
            self._recorder.write(Note("timed", (self._warm_rows, self._facts, self._rows)))


if __name__ == "__main__":
    main(lambda recorder: StepTimes(recorder).install())
