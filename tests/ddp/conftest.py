"""Ranks of a process group, each a forked process, that all call one function."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unisono

# torch ends the process where a thread of a group's own, which leaves a future, frees it last.
_GROUPS: list[Any] = []


def _as_rank(backend: str, path: str, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import os

    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = unisono.world()
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=world.rank, world_size=world.world_size
    )
    try:
        return work(*args)
    finally:
        gc.collect()  # gloo's threads must be done before the process is
        _GROUPS.append(dist.group.WORLD)
        dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Call ``work(*args)`` on every rank of a new group; return what they return."""
    used = 0

    def run(backend: str, world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        nonlocal used
        used += 1
        path = str(tmp_path / f"store{used}")
        return unisono.launch(_as_rank, backend, path, work, args, workers=world_size)

    return run
