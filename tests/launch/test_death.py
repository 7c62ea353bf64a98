"""Why a worker was killed: by what a made-up kernel says, and in a real job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.runtime.launch.report import Deaths
from unisono.runtime.workers.control_block import ControlBlock


class Bench:
    """A kernel that says what the test wants."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_s = root, 0.0
        self.control = ControlBlock.create(2)
        (root / "meminfo").write_text("MemTotal:       25165824 kB\nMemFree: 1 kB\n")
        self.kills(3)
        for pid, held_kib in ((10, 1258291), (11, 512)):
            (root / str(pid)).mkdir()
            (root / str(pid) / "status").write_text(f"Name:\tx\nVmRSS:\t {held_kib} kB\n")
        self.deaths = Deaths(self.control, root, str(root), lambda: self.now_s)

    def kills(self, count: int) -> None:
        (self.root / "vmstat").write_text(f"nr_free_pages 1\noom_kill {count}\n")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.control.close()


def test_a_kill_for_want_of_memory_says_who_held_how_much(bench: Bench) -> None:
    bench.deaths.look({0: 10, 1: 11})
    assert bench.deaths.how(-9) == ""
    bench.kills(4)
    assert bench.deaths.how(-9) == (
        "was killed by SIGKILL, as the kernel had run out of memory: shortly before, these held "
        "worker 0 1.2 GiB, worker 1 512 KiB, and the machine has 24 GiB, of which a container may "
        "get less: use a smaller batch or fewer workers"
    )
    assert bench.deaths.how(-9) == ""  # one kill explains one death


def test_memory_is_looked_at_twice_a_second_and_the_last_of_it_is_kept(bench: Bench) -> None:
    bench.deaths.look({0: 10})
    bench.deaths.look({1: 11})  # too early
    bench.now_s = 0.5
    bench.deaths.look({0: 99, 1: 11})  # the first has gone
    bench.kills(4)
    assert "worker 0 1.2 GiB, worker 1" in bench.deaths.how(-9)


def test_a_bus_error_is_explained_where_shared_memory_is_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(blocks: int) -> None:
        found = SimpleNamespace(f_bavail=blocks, f_blocks=16384, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: found)

    free(9000)
    assert bench.deaths.how(-7) == ""
    free(10)
    assert bench.deaths.how(-7).startswith(
        f"was killed by SIGBUS, as {bench.root} is full (64 MiB): remove"
    )


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
