"""Keep what was restored: the program repeats what led to it, such as setting a learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.engine.state.optimizer_state import group_options
from unisono.engine.state.saved import apply_groups
from unisono.training.run_context import RunContext


@contextmanager
def as_it_was(run: RunContext) -> Iterator[None]:
    """Restore options and weights after a block, if the loop continues an earlier one."""
    program, optimizer = run.program_kept, run.kept.optimizer
    if program is None or not program.is_continued(run.num_loops):
        yield
        return
    groups, model = group_options(optimizer), run.kept.model
    copies = [
        (tensor, tensor._version, tensor.detach().clone())
        for tensor in (*model.parameters(), *model.buffers())
    ]
    yield
    apply_groups(groups, optimizer)
    for tensor, version, copy in copies:
        if tensor._version != version:
            tensor.data.copy_(copy)
