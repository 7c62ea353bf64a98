"""What does a program keep beside its model's parameters and buffers, and does it reach the result?

What the passes of a loop's first step were seen to write (the least loss so far, samples seen) may
be the same when the same shard comes again. So in the second step it is put back to what it was
when the loop began, and the shards of both steps are computed in both orders::

    as it began ─► first shard ─► second shard        each must come to the same, and leave the
    as it began ─► second shard ─► first shard        same behind, as without the other before it

What is only stored passes, and so does a cache, which may be fuller.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.runtime.held import Held
from unisono.runtime.reach import Holder, reach

WHOLE = 32 << 20  # bytes of a tensor; of a larger one some are looked at
MUST = "the loss function and the model must depend on the shard alone, but"
IN_TIME = (
    "take the step from `unisono.progress()`, set a value in `on_step_begin`, return metrics in a "
    "dict, or keep a buffer of the model (`register_buffer`)."
)
OF_SAMPLES = (
    'return values of each sample as `"per_sample"` and change it in `on_step_end`, with those of '
    "the whole batch."
)
_OF_TENSORS = (
    f"keep a buffer of the model (`register_buffer`), return metrics in a dict, or {OF_SAMPLES}"
)

Seen = dict[str, Any]
"""By name, what a pass has come to."""


def look(model: nn.Module, functions: Sequence[Any]) -> Held:
    """Look at what is kept now.

    Args:
        model: which is trained; its parameters and buffers are not looked at.
        functions: the loss function, and what gives features where there is such a one.
    """
    parts = (model.parameters(), model.buffers(), model.modules())
    own = set(map(id, itertools.chain(*parts)))
    roots: dict[str, Any] = {"model": model}
    for name, function in zip(("loss", "embed"), map(_programs, functions), strict=False):
        roots[name] = function
        if type(function).__module__ in ("builtins", "functools"):  # no class of the program's
            roots[f"vars({name})"] = getattr(function, "__dict__", {})
    held = Held(reach(roots).holders, own, at_most=WHOLE, closely=True)
    for way, value in held.others.items():
        if isinstance(value, nn.Module) and not _is_metric(value):  # such as a teacher
            for part, parameter in value.named_parameters():
                if id(parameter) not in own:
                    held.note(Holder(way, lambda: iter(())), f".{part}", parameter)
    return held


@contextmanager
def metrics_put_back(held: Held) -> Iterator[None]:
    """Have objects of torchmetrics count nothing within a block."""
    found = [value for value in held.others.values() if _is_metric(value)]
    each = [of.values() if isinstance(of, nn.ModuleDict) else [of] for of in found]
    before = [
        (metric, name, deepcopy(getattr(metric, name)))
        for metric in itertools.chain(*each)
        if hasattr(metric, "_defaults")
        for name in [*metric._defaults, "_update_count", "_computed"]
    ]
    try:
        yield
    finally:
        for metric, name, value in before:
            setattr(metric, name, value)


def _is_metric(value: Any) -> bool:
    return type(value).__module__.startswith("torchmetrics.")


def _programs(function: Any) -> Any:
    """Give the program's own function, which ours may be around."""

    def is_own(function: Any) -> bool:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        return not module.startswith("unisono.")

    return inspect.unwrap(function, stop=is_own)


class Histories(NamedTuple):
    """What the program may have kept, and what comes of it. Final."""

    begun: Held  # as the loop began
    ways: Sequence[str]  # that passes have written since
    look: Callable[[], Held]
    is_alike: bool  # both shards' tensors have the same shapes

    def check(self, one: Callable[[], Seen], two: Callable[[], Seen], counted: Seen) -> None:
        """Refuse what goes on from one shard to another.

        Args:
            one, two: compute the shards, and give what that comes to.
            counted: what the second has come to in the step.
        """
        now = self.look()
        try:
            (one_first, left_by_one), (two_second, left_by_both) = self._computed(now, one, two)
            (two_first, left_by_two), (one_second, left_by_all) = self._computed(now, two, one)
            self._check_left(left_by_two, left_by_both, now, two)
            self._check_left(left_by_one, left_by_all, now, one)
            pairs = (one_first, one_second), (two_first, two_second), (two_first, counted)
            if any(difference(*pair) for pair in pairs):
                self._put_back(now, now)
                raise goes_on(self._culprit(now, two, counted), now)
        finally:
            self._put_back(now, now)

    def _computed(self, now: Held, *shards: Callable[[], Seen]) -> list[tuple[Seen, Held]]:
        """Compute shards from what was kept as the loop began."""
        self._put_back(self.begun, now)
        return [(compute(), self.look()) for compute in shards]

    def _put_back(self, to: Held, now: Held) -> None:
        for way in self.ways:
            to.put_back(way, now)

    def _check_left(self, alone: Held, after: Held, now: Held, shard: Callable[[], Seen]) -> None:
        """Refuse what is another after a shard if another one was computed before it."""
        ways = [way for way in self.ways if alone.differs_in(way, after, is_alike=self.is_alike)]
        if ways:
            ((_, again),) = self._computed(now, shard)  # a time is another one each time
            for way in ways:
                if alone.values[way] == again.values.get(way):
                    raise goes_on(way, alone)

    def _culprit(self, now: Held, two: Callable[[], Seen], counted: Seen) -> str:
        return culprit(self.ways, self.begun, now, lambda: bool(difference(two(), counted)))


def culprit(ways: Sequence[str], before: Held, now: Held, is_it: Callable[[], bool]) -> str:
    """Find what makes a difference when it alone is what it was before."""
    for way in ways:
        before.put_back(way, now)
        try:
            if is_it():
                return way
        finally:
            for each in ways:
                now.put_back(each, now)
    return "`, `".join(ways[:3])


def difference(one: Seen, other: Seen) -> str | None:
    """Name something that is not the same in both, of what both have."""
    return next((name for name in one if name in other and one[name] != other[name]), None)


def goes_on(way: str, held: Held) -> RuntimeError:
    """Make the refusal of what is kept from shard to shard."""
    return RuntimeError(
        f"{MUST} `{way}` goes on from shard to shard, and each worker computes others: "
        f"{IN_TIME if held.is_plain(way) else _OF_TENSORS}"
    )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """List the tensors in what a function takes or gives."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
