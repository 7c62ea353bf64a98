"""Ranks as threads (a group each, over one store in memory) and as processes (a program each)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch.distributed as dist
from tests.threads import in_threads
from tests.warm.processes import start

from unisono.runtime.c10d.group import Group

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 100


@pytest.fixture
def as_ranks() -> Callable[..., list[Any]]:
    """Run ``work(group, rank)`` in a thread a rank; return what they returned or raised.

    `store_of` gives each rank its view of the store; by default all have one in memory.
    """

    def run(world_size: int, work: Any, timeout_s: float = 30.0, store_of: Any = None) -> list[Any]:
        in_memory = dist.HashStore()

        def one(rank: int) -> Any:
            store = store_of(rank) if store_of else in_memory
            group = Group(store, rank, range(10, 10 + world_size), timeout_s)
            try:
                return work(group, rank)
            finally:
                group.shutdown()

        return in_threads(world_size, one)

    return run


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[CompletedProcess[str]]]:
    """Run a program of ``programs/`` once a rank, with (rank, world size, rendezvous file)."""

    def run(program: str, world_size: int, *arguments: str) -> list[CompletedProcess[str]]:
        processes = [
            start(
                [
                    *(sys.executable, str(PROGRAMS / program), str(rank), str(world_size)),
                    *(str(tmp_path / "store"), *arguments),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(world_size)
        ]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        ended = zip(processes, outputs, strict=True)
        return [CompletedProcess(one.args, one.returncode, output) for one, output in ended]

    return run
