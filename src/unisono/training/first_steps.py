"""What the first steps of a loop reveal about a program, reported once.

**Is a mean taken over labels of which some are ignored?** Shards are weighted by their samples, so
the mean of their means differs for each way of dividing the samples. It is not an error, but worth
a line. So is a pair (loss, accuracy), which is taken for (sum, weight).

**Will BatchNorm get a single value per channel?** torch refuses that, in the last step of an epoch.
The plan says whether a shard has one sample; the first pass of the loop shows the rest.

**Does the program change a dataset during a loop?** Loader processes read the copy with which the
loop began.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from unisono.engine.state.run_state import Position
from unisono.engine.step.loss import is_pair
from unisono.plan.samples import SamplePlan
from unisono.runtime.training_progress import now
from unisono.training.computing import is_compiled
from unisono.training.loop_plan import LoopPlan
from unisono.training.own_hook import OwnHook
from unisono.training.run_context import RunContext

_IGNORED = -100  # torch's default, and transformers'
_LOOKS_AT_MOST = 8  # into batches of shards
OF_LABELS = (
    "labels of -100 do not count, and there are more of them in some samples than in others, so a "
    "mean over the labels of a shard gives the same label more weight in one shard than in "
    "another: pass `unisono.token_mean` as the loss of a language model, or return "
    "`(sum, number of labels that count)`"
)
_PAIR = (
    "the loss returns a pair, so the first is a sum, which is divided by the second, its weight, "
    'here {:.4g}: if that is an accuracy, return `{{"loss": loss, "accuracy": right}}`'
)
_LOOKS_AT_DATA = 2
_LOOKED_AT = 1 << 20  # bytes of a tensor or an array
_CHANGED = (
    "`{}` has changed since the loop began, but loader processes read what the loop began with, so "
    "results depend on how many there are: let the dataset take step or epoch from "
    "`unisono.progress()`, or call `fit` again after each change"
)


@final
class LabelCounts:
    """Checks the first batches of a loop or an evaluation."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        # by place, how many labels of each sample count; and -100 once one was ignored
        self._counts: defaultdict[Any, set[int]] = defaultdict(set)
        self._looks = 0

    def watching(self, loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
        """Return a loss function that checks its batches and results."""

        def watched(model: nn.Module, batch: Any) -> Any:
            returned = loss(model, batch)
            self._looks += 1
            if self._looks <= _LOOKS_AT_MOST:
                self._look(batch, returned)
            return returned

        return watched

    def _look(self, batch: Any, returned: Any) -> None:
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if isinstance(loss, tuple) and is_pair(loss):
            is_one = isinstance(loss[1], torch.Tensor) and loss[1].numel() == 1
            weight = loss[1].item() if is_one else loss[1]
            if isinstance(weight, float) and 0 <= weight <= 1:
                self._run.say_once(_PAIR.format(weight))
            return
        for place, labels in _labels_in(batch):
            counting = (labels != _IGNORED).reshape(len(labels), -1).sum(1)
            counts = self._counts[place]
            counts.update(counting.tolist())
            if bool((labels == _IGNORED).any()):
                counts.add(_IGNORED)
            if _IGNORED in counts and len(counts) > 2:
                self._run.say_once(OF_LABELS)


def _labels_in(batch: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield integer tensors that are named as labels, or have no names."""
    places: list[tuple[Any, Any]] = []
    if isinstance(batch, Mapping):
        places = [one for one in batch.items() if "label" in str(one[0]) or "target" in str(one[0])]
    elif isinstance(batch, (tuple, list)):
        places = list(enumerate(batch))
    for place, value in places:
        is_full = isinstance(value, torch.Tensor) and value.ndim and value.numel()
        if is_full and value.dtype in (torch.int64, torch.int32):
            yield place, value


@contextmanager
def single_samples_refused(model: nn.Module, plan: LoopPlan, position: Position) -> Iterator[None]:
    """Refuse single samples in the first pass over each BatchNorm, not in a later step."""
    with ExitStack() as stack:
        if not is_compiled(model) and (where := _where(plan, position)):
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    stack.callback(_refusing(module, where, plan.samples).remove)
        yield


def _refusing(module: nn.Module, where: str, samples: SamplePlan) -> RemovableHandle:
    """Make a BatchNorm check, in its first pass in training, how many values it gets."""

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not (module.training and args):
            return
        _, _, batch, shard = now().at
        num_samples = 0 if shard is None else samples.shard_size(batch, shard)
        # More rows, such as the tokens or points of each sample, give more values per channel.
        if len(args[0]) <= num_samples and math.prod(args[0].shape[2:]) == 1:
            raise ValueError(
                f"BatchNorm must get more than one value per channel in training, but "
                f"{where}, or put the layer into `eval()`."
            )
        handle.remove()

    handle = module.register_forward_pre_hook(OwnHook(look))
    return handle


def _where(plan: LoopPlan, position: Position) -> str:
    """Describe which batch of the loop leaves a shard with one sample; empty if none does."""
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
