"""Why a worker was aborted: by what ranks have called, and in a real job."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.runtime.launch.report import calls_apart
from unisono.runtime.workers.control_block import ControlBlock


@pytest.mark.parametrize(
    ("calls", "is_known"),
    [
        ([(0, b"all_reduce of float32 [4]"), (1, b"all_reduce of float32 [8]")], True),
        ([(0, b"barrier"), (1, b"barrier")], False),
        ([(0, b"barrier"), (0, b"barrier"), (1, b"broadcast")], False),  # one has come further
        ([], False),
    ],
)
def test_an_abort_is_explained_where_calls_differ(
    calls: list[tuple[int, bytes]], is_known: bool
) -> None:
    control = ControlBlock.create(2)
    for rank, call in calls:
        control.note_call(rank, call)
    assert bool(calls_apart(control)) is is_known
    control.close()


def reduce_different_sizes() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4 if dist.get_rank() == 0 else 1 << 20))


@pytest.mark.slow
def test_sizes_that_differ_are_told_of_where_gloo_aborts() -> None:
    with pytest.raises(unisono.errors.WorkerError) as caught:
        unisono.launch(reduce_different_sizes, workers=2)
    assert (
        "as ranks called different collectives: rank 0 `all_reduce of float32 [4]`, rank 1 "
        "`all_reduce of float32 [1048576]`. Every rank must make the same calls"
    ) in str(caught.value)
