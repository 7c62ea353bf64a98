"""Deterministic kernels on accelerators: torch's switches are set for a time, then put back.

On the CPU torch's kernels are deterministic as they are, so nothing is touched there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic_kernels(is_needed: bool) -> Iterator[None]:
    """Have torch choose deterministic kernels within a block, and refuse operations without one.

    Args:
        is_needed: whether to touch anything: the device is an accelerator, and the run is exact.

    cuDNN chooses its kernels without trying which is the fastest, as that may differ from one
    process to the next. Memory that nobody has written is not filled: that takes time, and no
    result may depend on it.
    """
    if not is_needed:
        yield
        return
    inductor: Any = torch._inductor.config  # which torch's own switch sets, too, in newer versions
    memory: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    compiled = getattr(inductor, "deterministic", None)
    fills = memory.fill_uninitialized_memory
    tries, repeats = cudnn.benchmark, cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        if compiled is not None:
            inductor.deterministic = compiled
        memory.fill_uninitialized_memory = fills
        cudnn.benchmark, cudnn.deterministic = tries, repeats
