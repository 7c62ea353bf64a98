"""Which objects of the program may it change between steps? They are saved with its run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from unisono.data.data_reading import is_stream
from unisono.data.epoch_order import EpochOrder, KeptOrder
from unisono.engine.state.optimizer_state import optimizers_as_objects, tensors_of
from unisono.programs.frames import KeptFrame
from unisono.programs.kept import KEY, KeptProgram
from unisono.programs.walk import LONG, VISITED_AT_MOST, programs_own
from unisono.training.loop_plan import LoopPlan
from unisono.training.run_context import RunContext

ORDER_KEY = "unisono.order"
"""The key of an epoch's order in a run's state."""


def watch_program(
    run: RunContext, plan: LoopPlan, loops: Sequence[KeptFrame], *, are_all: bool
) -> None:
    """Register what the program may change between steps, so that it is saved with the run.

    `loops`: the frames of the program's own loop; `are_all`: no others are found later.
    """
    between = optimizers_as_objects(run.kept.optimizer, of_torch=False)
    between |= run.observer.own_callbacks
    state = run.kept.state.items()
    between |= {f"the schedule {key}": one for key, one in state if isinstance(one, LRScheduler)}
    between["run.state"] = {k: one for k, one in state if not hasattr(one, "state_dict")}
    runs = run.observer.runs_program_code or run.options.on_gradients is not None
    if (len(between) > 1 or runs) and run.program_kept is None:
        run.program_kept = KeptProgram(
            run.kept.model, partial(tensors_of, run.kept.optimizer), run.kept.state
        )
    if isinstance(plan.samples.order_of, EpochOrder):
        kept_order = run.kept.hidden.get(ORDER_KEY)
        run.kept.hidden[ORDER_KEY] = KeptOrder(
            plan.samples.order_of, lambda: run.kept.position.epoch
        )
        if isinstance(kept_order, Mapping):
            plan.samples.order_of.adopt(kept_order)
    else:
        run.kept.hidden.pop(ORDER_KEY, None)
    if run.program_kept is not None:
        names = ("loss", "embed") if len(run.functions) == 2 else ()
        passes = dict(zip(names, map(programs_own, run.functions), strict=False))
        passes |= {"on_gradients": run.options.on_gradients, "model": run.kept.model}
        passes |= {**plan.program, "sampler": plan.reading.sampler}
        between |= optimizers_as_objects(run.kept.optimizer, of_torch=True)
        # Each worker has read a stream up to a different place.
        streams = filter(is_stream, [plan.reading.dataset])
        themselves = set(_schedules_in(run.kept.state))
        run.program_kept.watch(passes, between, loops, themselves, set(map(id, streams)))
        run.program_kept.has_all_frames = are_all
        if run.program_kept.is_cut:
            run.say_once(
                f"the program refers to more than {VISITED_AT_MOST:,} objects, or has some in a "
                f"container of more than {LONG:,}: changes in those, and in objects farthest from "
                f"the model, the loss and the dataset, are not saved with the run, so keep what "
                f"changes in `run.state`"
            )
        # The run may have resumed without any.
        kept, run.kept.hidden[KEY] = run.kept.hidden.get(KEY), run.program_kept
        if isinstance(kept, Mapping):
            run.program_kept.load_state_dict(kept)


def _schedules_in(state: Any) -> Iterator[int]:
    """Yield the ids of schedules, also of those within schedules, which save their attributes."""
    for each in state.values() if isinstance(state, Mapping) else state:
        if isinstance(each, LRScheduler):
            yield id(each)
            yield from _schedules_in(vars(each).get("_schedulers", ()))
