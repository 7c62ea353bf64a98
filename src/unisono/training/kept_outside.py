"""What does a program keep beside its model's parameters and buffers?"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn

from unisono.runtime.held import Held
from unisono.runtime.reach import Holder, reach

WHOLE = 32 << 20  # bytes of a tensor; of a larger one some are looked at


def look(model: nn.Module, functions: Sequence[Any]) -> Held:
    """Look at what is kept now.

    Args:
        model: which is trained; its parameters and buffers are not looked at.
        functions: the loss function, and what gives features where there is such a one.
    """
    parts = (model.parameters(), model.buffers(), model.modules())
    own = set(map(id, itertools.chain(*parts)))
    named = zip(("loss", "embed"), map(_programs, functions), strict=False)
    roots: dict[str, Any] = {"model": model, **dict(named)}
    held = Held(reach(roots).holders, own, at_most=WHOLE)
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
