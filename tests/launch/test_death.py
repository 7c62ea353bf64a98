"""Why a worker was killed: by what a made-up kernel says, and in a real job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.runtime.launch.report import Deaths
from unisono.runtime.workers.control_block import ControlBlock


class Bench:
    """A kernel that says what the test wants."""

    def __init__(self, root: Path) -> None:
        self.root, self.control = root, ControlBlock.create(2)
        self.kills(3)
        self.deaths = Deaths(self.control, root)

    def kills(self, count: int) -> None:
        (self.root / "vmstat").write_text(f"nr_free_pages 1\noom_kill {count}\n")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.control.close()


def test_a_kill_for_want_of_memory_is_told_once(bench: Bench) -> None:
    assert bench.deaths.how(-9) == ""
    bench.kills(4)
    assert "as the kernel had run out of memory: use a smaller batch" in bench.deaths.how(-9)
    assert bench.deaths.how(-9) == ""  # one kill explains one death


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
    bench: Bench, calls: list[tuple[int, bytes]], is_known: bool
) -> None:
    for rank, call in calls:
        bench.control.note_call(rank, call)
    assert bool(bench.deaths.how(-6)) is is_known


@pytest.mark.parametrize("exit_code", [0, 1, -11, -15])
def test_nothing_is_said_of_other_ends(bench: Bench, exit_code: int) -> None:
    bench.kills(9)
    assert bench.deaths.how(exit_code) == ""


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
