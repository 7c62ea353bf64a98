"""Which parameters got no gradient? torch's DDP tells their indices; here they have names.

Loads no torch: a launcher imports this.
"""

from __future__ import annotations

import re
from traceback import walk_tb
from typing import Any

from unisono.notices import named

_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([0-9 ]+)")


def unused_in_words(error: BaseException, ddp: Any = None) -> str | None:
    """Put torch's error about unused parameters into words, with their names.

    Args:
        error: any exception.
        ddp: the DistributedDataParallel that raised it; None: it is looked for in the traceback.

    Returns:
        None for any other error.
    """
    found = _INDICES.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    names = _names(ddp if ddp is not None else _ddp_of(error))
    indices = [int(word) for word in found[1].split()]
    told = [names.get(index, f"number {index}") for index in indices]
    them = "it" if len(told) == 1 else "them"
    return (
        f"every parameter of a DistributedDataParallel must get a gradient in every backward pass, "
        f"but {named(told)} got none: use {them} in the loss, fix {them} with "
        f"`requires_grad_(False)`, or pass `find_unused_parameters=True`. If the model's output is "
        f"of a class of your own, return tensors, tuples or dicts from `forward`, in which DDP "
        f"finds what was used."
    )


def _ddp_of(error: BaseException) -> Any:
    """Find the innermost DistributedDataParallel in a traceback."""
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if hasattr(type(owner), "_build_params_for_reducer"):
            found = owner
    return found


def _names(ddp: Any) -> dict[int, str]:
    """Name parameters by the index that the reducer knows them by."""
    if ddp is None:
        return {}
    names: dict[int, str] = {}
    seen: set[int] = set()
    for prefix, module in ddp.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_ignored = f"{prefix}.{name}" in ddp.parameters_to_ignore
            if parameter.requires_grad and not is_ignored and id(parameter) not in seen:
                seen.add(id(parameter))
                names[len(names)] = f"{prefix}.{name}".lstrip(".")
    return names
