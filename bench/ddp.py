"""What does one word change? A DDP script on "gloo", and the same script on "unisono".

    python -m bench --only ddp

One set of processes runs both and changes between them every few steps (A B A B …), so that
whatever else the machine does meets both; the ratio is the median of those of neighbours. Each has
a model, an optimizer and a loader of its own. This file is also the program of each process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono  # noqa: F401  (makes its backend known)
from bench.processes import environment, run_together
from bench.sides import SEED, TIMEOUT, batches
from bench.workloads import WORKLOADS, Workload

WORKLOAD = "cnn8"
BACKENDS = ("gloo", "unisono")
STEPS_A_TURN = 25
WARMUP_PAIRS = 3


@dataclass(frozen=True)
class Turns:
    """Seconds of each turn on either backend; turns at one place are neighbours."""

    num_workers: int
    data: str
    seconds: dict[str, list[float]]

    def samples_per_s(self, backend: str) -> float:
        """Return the median rate of all workers together."""
        samples = STEPS_A_TURN * WORKLOADS[WORKLOAD].batch_size * self.num_workers
        return samples / statistics.median(self.seconds[backend])

    @property
    def ratio(self) -> float:
        """How many times as fast as on gloo: the median over neighbours."""
        pairs = zip(*(self.seconds[backend] for backend in BACKENDS), strict=True)
        return statistics.median(gloo_s / unisono_s for gloo_s, unisono_s in pairs)

    def as_json(self) -> dict[str, Any]:
        rates = {backend: self.samples_per_s(backend) for backend in BACKENDS}
        return {"seconds": self.seconds, "samples_per_s": rates, "ratio": self.ratio}


def measure_ddp(num_workers: int, data: Path, *, num_pairs: int) -> Turns:
    """Start the processes, wait for them, return what rank 0 measured.

    Raises:
        SideFailedError: with the last lines that a process printed.
    """
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        out = Path(folder, "result.json")
        command = [
            *(sys.executable, "-m", "bench.ddp", "--data", str(data), "--out", str(out)),
            *("--pairs", str(num_pairs), "--rendezvous", str(Path(folder, "store"))),
        ]
        environments = [
            environment(1, RANK=str(rank), WORLD_SIZE=str(num_workers), GLOO_SOCKET_IFNAME="lo")
            for rank in range(num_workers)
        ]
        run_together([(command, environ) for environ in environments], Path(folder))
        return Turns(num_workers, **json.loads(out.read_text()))


def script(backend: str, workload: Workload, dataset: TensorDataset) -> Callable[[], None]:
    """Return one step of a training script as people write it. Collective: every rank calls it."""
    torch.manual_seed(SEED)
    model = DistributedDataParallel(workload.build(), process_group=dist.new_group(backend=backend))
    optimizer = torch.optim.Adam(model.parameters(), lr=workload.lr)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=SEED, drop_last=True)
    endless = batches(DataLoader(dataset, workload.batch_size, sampler=sampler, drop_last=True))

    def step() -> None:
        batch = next(endless)
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()

    return step


def take_turns(steps: dict[str, Callable[[], None]], num_pairs: int) -> dict[str, list[float]]:
    """Time each backend's turns, those of the warm-up aside. Collective: every rank calls it."""
    seconds: dict[str, list[float]] = {backend: [] for backend in steps}
    for pair in range(-WARMUP_PAIRS, num_pairs):
        for backend, step in steps.items():
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                step()
            dist.barrier()
            if pair >= 0:
                seconds[backend].append(time.perf_counter() - start_s)
    return seconds


def main() -> None:
    """Be one rank; rank 0 writes what it saw as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rendezvous", required=True, help="a new file for the process group")
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(SEED)  # every process draws the same stand-in data
    workload = WORKLOADS[WORKLOAD]
    num_samples = (WARMUP_PAIRS + args.pairs) * STEPS_A_TURN * workload.batch_size * world_size
    dataset, is_real = workload.load(args.data, num_samples)
    dist.init_process_group(
        "unisono",
        init_method=f"file://{args.rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    steps = {backend: script(backend, workload, dataset) for backend in BACKENDS}
    seconds = take_turns(steps, args.pairs)
    if rank == 0:
        data = "real" if is_real else "random"
        args.out.write_text(json.dumps({"data": data, "seconds": seconds}))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads now and then abort a process that is already done


if __name__ == "__main__":
    main()
