"""cuBLAS gives the same bits each time only with workspaces of a fixed size: a variable says so.

cuBLAS and torch read it at the first matrix product of a process, so it must be set before. The
launcher sets it for workers that get GPUs; in a process that nobody launched, the first run on a
GPU does. Source: cuBLAS documentation, "Results reproducibility".
"""

from __future__ import annotations

from collections.abc import MutableMapping

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACES = ":4096:8"
"""Eight of 4 MiB: 32 MiB of a GPU's memory for each process."""


def fix_workspaces(environ: MutableMapping[str, str]) -> None:
    """Have cuBLAS use workspaces of a fixed size, unless the user has said something else.

    Call it before CUDA is used: after the first matrix product on a GPU it has no effect.
    """
    environ.setdefault(WORKSPACE_VARIABLE, FIXED_WORKSPACES)
