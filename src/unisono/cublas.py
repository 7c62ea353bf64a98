"""cuBLAS gives the same bits each time only with workspaces of a fixed size: a variable says so.

cuBLAS and torch read it at the first matrix product of a process, so it must be set before. The
launcher sets it for workers that get GPUs; a process that nobody launched calls
:func:`fix_workspaces` itself. Source: cuBLAS documentation, "Results reproducibility".
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACES = ":4096:8"
"""Eight of 4 MiB: 32 MiB of a GPU's memory for each process."""
_FIXED = (FIXED_WORKSPACES, ":16:8")


def fix_workspaces(environ: MutableMapping[str, str] | None = None) -> bool:
    """Have cuBLAS use workspaces of a fixed size, unless the user has said something else.

    Call it before CUDA is used: after the first matrix product on a GPU it has no effect.

    Args:
        environ: the variables to read and to set; the process's own by default.

    Returns:
        Whether the variable says now what ``torch.use_deterministic_algorithms`` asks for.
    """
    environ = os.environ if environ is None else environ
    return environ.setdefault(WORKSPACE_VARIABLE, FIXED_WORKSPACES) in _FIXED
