"""Will BatchNorm get a single value per channel? torch refuses that, in the last step of an epoch.

Whether a shard has one sample follows from the plan. Whether a sample has one value per channel
shows the first forward pass of the loop, which fails then, before any step is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from unisono.plan.samples import SamplePlan
from unisono.state.position import Position
from unisono.train.compiling import is_compiled
from unisono.train.loop_plan import LoopPlan
from unisono.training_progress import now


@contextmanager
def single_samples_refused(model: nn.Module, plan: LoopPlan, position: Position) -> Iterator[None]:
    """Refuse, in the first pass over each BatchNorm, what would fail in a later one.

    Args:
        position: where the loop begins.
    """
    with ExitStack() as stack:
        if not is_compiled(model) and (where := _where(plan, position)):
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    look = _Look(where, plan.samples)
                    look.handle = module.register_forward_pre_hook(look)
                    stack.callback(look.handle.remove)
        yield


def _where(plan: LoopPlan, position: Position) -> str:
    """Say which batch of the loop leaves a shard with one sample; empty if none does."""
    samples = plan.samples
    last = samples.steps_per_epoch - 1
    num_steps = plan.totals.end_step(samples, position) - position.step
    for name, batch in (("each batch", 0), ("the last batch of an epoch", last)):
        comes = not batch or position.batch + num_steps > last
        if comes and 1 in samples.shard_sizes(batch):
            return (
                f"{name} ({samples.num_batch_samples(batch)} samples in {samples.shards} shards) "
                f"leaves a shard with a single sample: pass "
                f"{'`drop_last=True`, ' * (batch > 0)}another `batch_size` or fewer `shards`"
            )
    return ""


class _Look:
    """Looks at what a BatchNorm gets first. Final."""

    handle: RemovableHandle

    def __init__(self, where: str, samples: SamplePlan) -> None:
        self._where, self._samples = where, samples

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not (module.training and args):
            return
        _, _, batch, shard = now().at
        num_samples = 0 if shard is None else self._samples.shard_size(batch, shard)
        # More rows, as of the tokens or points of each sample, are more values per channel.
        if len(args[0]) <= num_samples and math.prod(args[0].shape[2:]) == 1:
            raise ValueError(
                f"BatchNorm must get more than one value per channel in training, but "
                f"{self._where}, or put the layer into `eval()`."
            )
        self.handle.remove()
