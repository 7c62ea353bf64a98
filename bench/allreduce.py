"""How fast is all_reduce on shared memory beside gloo? ``python -m bench.allreduce``

One set of processes has both backends and measures them in turn (A B C A B C …), so that whatever
else the machine does meets all of them. A turn is some calls in a row. With ``--fresh`` every rank
writes its whole tensor before each call, and all meet, as after a backward pass: then none of
another rank's part is in this core's cache. Shown are medians, and ratios within one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import unisono

SIZES = [4 << 10, 256 << 10, 1_686_568, 16_800_000, 67_200_000]  # the third is a small CNN's
SIDES = ["gloo", "unisono"]
SECONDS_PER_SIDE_AND_SIZE = 0.8
CALLS_A_TURN = 5
TURNS_AT_LEAST, TURNS_AT_MOST = 5, 200
TIMEOUT_S = 300


def main() -> int:
    args = parse()
    if args.rank is not None:
        measure(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        command = [sys.executable, "-m", "bench.allreduce", "--workers", str(args.workers)]
        command += ["--rendezvous", str(Path(folder, "store"))] + ["--fresh"] * args.fresh
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(args.workers)
        ]
        try:
            return max(abs(rank.wait(TIMEOUT_S)) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.allreduce", description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--fresh", action="store_true", help="write the tensor before each call")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{args.rendezvous}",
        rank=args.rank,
        world_size=args.workers,
    )
    group = dist.new_group(backend="unisono")
    medians_s = {num_bytes: medians_of(num_bytes, group, args.fresh) for num_bytes in SIZES}
    dist.destroy_process_group()
    if args.rank == 0:
        show(medians_s, args)


def medians_of(num_bytes: int, group: dist.ProcessGroup, is_fresh: bool) -> list[float]:
    """Measure one size on all sides; seconds in the order of :data:`SIDES`."""
    numel = num_bytes // 4
    tensor = torch.zeros(numel)
    sides = [None, group]

    def turn(measured: dist.ProcessGroup | None) -> list[float]:
        dist.barrier(group=group)
        return [time_of(tensor, measured, group if is_fresh else None) for _ in range(CALLS_A_TURN)]

    num_turns = torch.tensor([TURNS_AT_LEAST])
    for _ in range(2):  # the first warms up, the second tells how many turns there is time for
        longest_s = max(sum(turn(side)) for side in sides)
        num_turns[0] = max(TURNS_AT_LEAST, SECONDS_PER_SIDE_AND_SIZE / longest_s)
    dist.broadcast(num_turns, 0, group=group)
    times_s: list[list[float]] = [[] for _ in sides]
    for _ in range(min(TURNS_AT_MOST, num_turns.item())):
        for side, times in zip(sides, times_s, strict=True):
            times += turn(side)
    return [statistics.median(times) for times in times_s]


def time_of(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, fresh_in: dist.ProcessGroup | None
) -> float:
    if fresh_in is not None:
        tensor.fill_(0.0)
        dist.barrier(group=fresh_in)
    start_s = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    return time.perf_counter() - start_s


def show(medians_s: dict[int, list[float]], args: argparse.Namespace) -> None:
    how = "tensors just written" if args.fresh else "calls in a row"
    table = Table(title=f"all_reduce of float32, {args.workers} workers, {how}: median ms")
    for heading in ("bytes", *SIDES):
        table.add_column(heading, justify="right", no_wrap=True)
    for num_bytes, (gloo_s, ours_s) in medians_s.items():
        ours = f"{1000 * ours_s:.3f}  ({gloo_s / ours_s:.1f}× gloo)"
        table.add_row(f"{num_bytes:,}", f"{1000 * gloo_s:.3f}", ours)
    Console(width=None if os.isatty(1) else 110).print(table)
    print(f"torch {torch.__version__}, unisono {unisono.__version__}, load {os.getloadavg()[0]}")


if __name__ == "__main__":
    sys.exit(main())
