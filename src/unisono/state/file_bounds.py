"""How large can a file be of which a run or a model has a use for all? Generous, but not endless.

A file may be as large as it says and still be mostly holes: it takes no place on the disk, and
hours to read. The bounds are far above what anything needs, so that a file of another model is
still read, and what differs is named.
"""

from __future__ import annotations

import os

from torch import nn

_TIMES = 16  # a wider dtype, buffers that are gone, a larger model of the same kind
_BESIDES = 1 << 30  # names, and small models


def bytes_at_most(model: nn.Module) -> dict[str, int]:
    """Say how large each file of a checkpoint may be from which a run of a model goes on.

    An optimizer's state and ``run.state`` may be of any size that fits into memory.
    """
    in_memory = memory_bytes()
    return {
        "model.safetensors": min(bytes_of_model(model), in_memory),
        "optimizer.safetensors": in_memory,
        "run.json": min(_BESIDES, in_memory),
    }


def bytes_of_model(model: nn.Module) -> int:
    """Say how large a file of a model's weights may be."""
    tensors = [*model.parameters(), *model.buffers()]
    return _TIMES * sum(tensor.nbytes for tensor in tensors) + _BESIDES


def memory_bytes() -> int:
    """Say how much memory this machine has; what is larger cannot be read at all."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
