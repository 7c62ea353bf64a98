"""Programs that ask torch for gloo run on the backend `unisono` where the user says so."""

from __future__ import annotations

import pytest
from tests.launch.conftest import PROGRAMS, Run
from tests.launch.test_groups import run_script

import unisono

WAYS = ["gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:gloo", "None"]
OURS = "unisono.runtime.c10d.group.Group"
TORCHS = "torch.distributed.distributed_c10d.ProcessGroup"


def assert_all_is_ours(output: str) -> None:
    """Check that every group was our backend's, and that models end with the bits it gives."""
    lines = dict(line.rsplit(": ", 1) for line in output.splitlines())
    bits = lines.pop("unisono")
    assert lines == dict.fromkeys(WAYS, OURS) | {"gloo": bits}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_asked_for_gloo_the_backend_answers_to_its_name(workers: int) -> None:
    for output in unisono.launch(
        run_script, "asks_for_gloo.py", workers=workers, backend="unisono"
    ):
        assert_all_is_ours(output)


@pytest.mark.slow
def test_the_command_has_the_same_option(unisono_run: Run) -> None:
    program = PROGRAMS / "asks_for_gloo.py"
    done = unisono_run("-n", 2, "--backend", "unisono", program)
    assert done.returncode == 0, done.stderr
    assert_all_is_ours(done.stdout)


def test_a_backend_that_it_does_not_know_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ValueError, match="`backend` must be gloo or unisono, but is 'nccl'"):
        unisono.launch(first_group, workers=1, backend="nccl")


@pytest.mark.slow
def test_gloo_is_gloo_where_nobody_has_said_otherwise() -> None:
    assert unisono.launch(first_group, workers=1) == [TORCHS]


def first_group() -> str:
    """Say which class the first group of a program is of."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    kind = type(dist.group.WORLD)
    dist.destroy_process_group()
    return f"{kind.__module__}.{kind.__qualname__}"
