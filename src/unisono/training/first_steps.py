"""What the first steps of a loop show about a program, told once.

**Is a mean taken over labels of which some do not count?** Then shards weigh as their samples do,
as in ``model(**batch).loss`` or ``cross_entropy(…)`` with padded labels: a mean of such means is
another number for each way to divide the samples. It is no error, but deserves a line.

**Does the program change a data set in the course of a loop?** Loader processes read the copy of it
with which the loop began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from unisono.data.data_reading import Reading
from unisono.engine.step.loss import is_pair
from unisono.runtime.held import Held
from unisono.runtime.reach import reach
from unisono.training.run_context import RunContext

_IGNORED = -100  # torch's default, and transformers'
_LOOKS_AT_MOST = 8  # into batches of shards
_LINE = (
    "labels of -100 do not count, and there are more of them in some samples than in others, so a "
    "mean over the labels of a shard gives the same label more weight in one shard than in "
    "another: pass `unisono.token_mean` as the loss of a language model, or return "
    "`(sum, number of labels that count)`"
)
_LOOKS_AT_DATA = 2
_LOOKED_AT = 1 << 20  # bytes of a tensor or an array
_CHANGED = (
    "`{}` has changed since the loop began, but loader processes read what the loop began with, so "
    "results depend on how many there are: have the data set take step or epoch from "
    "`unisono.progress()`, or call `fit` again after each change"
)


class LabelCounts:
    """Looks at the first batches of a loop or an evaluation. Final."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        # by place, how many labels of each sample count; and -100 once there was one
        self._counts: defaultdict[Any, set[int]] = defaultdict(set)
        self._looks = 0

    def watching(self, loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
        """Give the loss function that looks at what it gets and returns."""

        def watched(model: nn.Module, batch: Any) -> Any:
            returned = loss(model, batch)
            self._looks += 1
            if self._looks <= _LOOKS_AT_MOST:
                self._look(batch, returned)
            return returned

        return watched

    def _look(self, batch: Any, returned: Any) -> None:
        if is_pair(returned["loss"] if isinstance(returned, Mapping) else returned):
            return
        for place, labels in _labels_in(batch):
            counting = (labels != _IGNORED).reshape(len(labels), -1).sum(1)
            counts = self._counts[place]
            counts.update(counting.tolist())
            if bool((labels == _IGNORED).any()):
                counts.add(_IGNORED)
            if _IGNORED in counts and len(counts) > 2:
                self._run.say_once(_LINE)


class ChangedData:
    """Looks whether the program changes what loader processes have a copy of. Final."""

    def __init__(self, run: RunContext, reading: Reading) -> None:
        self._run, self._reading = run, reading
        self._looks = 0
        self._before = self._held() if reading.loader_workers else None

    def look(self, *, has_ended: bool) -> None:
        """Look after a step, if it is one of the first, or an epoch has ended."""
        before = self._before
        if before is None or not (has_ended or self._looks < _LOOKS_AT_DATA):
            return
        self._looks += 1
        now = self._held()
        for way in before.written_in(now):
            if now.is_plain(way) or before.differs_in(way, now, is_alike=True):
                self._before = None
                self._run.say_once(_CHANGED.format(way))
                return

    def _held(self) -> Held:
        return Held(reach({"dataset": self._reading.dataset}).holders, at_most=_LOOKED_AT)


def _labels_in(batch: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Give the tensors of whole numbers that are labels by name, or come without names."""
    places: list[tuple[Any, Any]] = []
    if isinstance(batch, Mapping):
        places = [one for one in batch.items() if "label" in str(one[0]) or "target" in str(one[0])]
    elif isinstance(batch, (tuple, list)):
        places = list(enumerate(batch))
    for place, value in places:
        is_full = isinstance(value, torch.Tensor) and value.ndim and value.numel()
        if is_full and value.dtype in (torch.int64, torch.int32):
            yield place, value
