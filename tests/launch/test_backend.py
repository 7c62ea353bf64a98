"""Programs that ask torch for gloo run on the backend `unisono` where the user says so."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import unisono

PROGRAMS = Path(__file__).parent / "programs"
WAYS = ["gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:gloo", "None"]
OURS = "unisono.c10d.group.Group"
TORCHS = "torch.distributed.distributed_c10d.ProcessGroup"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run_script(name: str) -> dict[str, str]:
    """Run a program as its worker would, and return the lines that it prints, by their names."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(PROGRAMS / name), run_name="__main__")
    return dict(line.rsplit(": ", 1) for line in printed.getvalue().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_asked_for_gloo_the_backend_answers_to_its_name(workers: int) -> None:
    for lines in unisono.launch(run_script, "asks_for_gloo.py", workers=workers, backend="unisono"):
        bits = lines.pop("unisono")
        assert lines == dict.fromkeys(WAYS, OURS) | {"gloo": bits}


def test_gloo_is_gloo_where_nobody_has_said_otherwise() -> None:
    (lines,) = unisono.launch(first_group, workers=1)
    assert lines == TORCHS


def first_group() -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    kind = type(dist.group.WORLD)
    dist.destroy_process_group()
    return f"{kind.__module__}.{kind.__qualname__}"
