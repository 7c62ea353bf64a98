"""What is noted of the collectives that a program calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.runtime.hangs.collective_notes import in_words
from unisono.runtime.workers.context import context

ONE, TWO = torch.zeros(4), torch.zeros(2, 3, dtype=torch.int64)
OPTIONS = SimpleNamespace()


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("allreduce", ([ONE], OPTIONS), "all_reduce of float32 [4]"),
        ("_allgather_base", (ONE, TWO), "all_gather_into_tensor of float32 [4]"),
        ("allgather", ([[TWO, TWO]], [TWO]), "all_gather of 2 × int64 [2, 3]"),
        ("barrier", (OPTIONS,), "barrier"),
        ("barrier", (), "barrier"),
        ("send", ([TWO], 1, 0), "send of int64 [2, 3] to rank 1"),
        ("recv", ([ONE], 0, 0), "recv of float32 [4] from rank 0"),
        ("recv_anysource", ([ONE], 0), "recv of float32 [4]"),
        ("scatter", ([ONE], []), "scatter of float32 [4]"),
    ],
)
def test_a_call_in_words(name: str, args: tuple[object, ...], words: str) -> None:
    assert in_words(name, args) == words


def calls_of_a_program() -> list[tuple[int, str]]:
    dist.init_process_group("gloo")
    rank, seen = dist.get_rank(), []
    control = context().supervisor.control

    def look() -> None:
        count, call = control.call_of(rank)
        seen.append((count, call.decode()))

    dist.all_reduce(torch.ones(4))
    look()
    dist.all_gather_object([None] * 2, {"rank": rank})
    look()
    first = dist.new_group([0])
    if rank == 0:
        dist.broadcast(torch.ones(2, 2), src=0, group=first)
    look()
    dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.mark.slow
def test_a_worker_notes_its_collectives_and_those_of_a_part_with_its_ranks() -> None:
    first, second = unisono.launch(calls_of_a_program, workers=2)
    assert first[0] == second[0] == (1, "all_reduce of float32 [4]")
    assert first[1][0] == second[1][0] > 2  # sizes and bytes
    assert first[1][1].startswith("all_gather of 2 × uint8 [")
    assert first[2] == (first[1][0] + 1, "broadcast of float32 [2, 2] among ranks 0")
    assert second[2] == second[1]
