"""The programs of the recovery measurement: one for ``unisono run``, one for ``torchrun``.

Both train the MNIST network and append a line after every step that is done::

    step, time.monotonic(), process id, rank

``CLOCK_MONOTONIC`` is the same for all processes of a machine, and a short line is appended by one
``write``, so that many processes may share the file. Both end themselves at `--until`, in case
nobody is left to end them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench.workloads import WORKLOADS, Workload

SEED = 0
GLOO_TIMEOUT = timedelta(seconds=120)


def train_unisono(args: argparse.Namespace, workload: Workload, dataset: TensorDataset) -> None:
    import unisono

    model = workload.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=workload.lr)
    where = {} if args.device is None else {"device": args.device}
    run = unisono.Run(model, optimizer, shards=args.workers, seed=SEED, **where)
    note = noting(args, unisono.world().rank)
    batch_size = args.workers * workload.batch_size
    for step in run.steps(dataset, batch_size=batch_size, steps=args.steps):
        with step:
            for batch in step.shards:
                step.backward(workload.loss(model, batch))
        if step.is_done:
            note(step.number)


def train_ddp(args: argparse.Namespace, workload: Workload, dataset: TensorDataset) -> None:
    """Write a checkpoint after every step, and go on from it: what loses no step on torch."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=GLOO_TIMEOUT)
    model = nn.parallel.DistributedDataParallel(workload.build())
    optimizer = torch.optim.Adam(model.parameters(), lr=workload.lr)
    num_done = 0
    if args.checkpoint.is_file():
        state = torch.load(args.checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        num_done = state["steps"]
    note = noting(args, dist.get_rank())
    for step, batch in zip(count(num_done), batches(dataset, workload, num_done), strict=False):
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            save(args.checkpoint, model.module, optimizer, step + 1)
        note(step)


def batches(dataset: TensorDataset, workload: Workload, num_done: int) -> Iterator[list[Tensor]]:
    """Give this rank's batches for ever, from the one after `num_done`."""
    from torch.utils.data import DistributedSampler

    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=SEED, drop_last=True)
    first_epoch, skipped = divmod(num_done, len(sampler) // workload.batch_size)
    for epoch in count(first_epoch):
        sampler.set_epoch(epoch)
        rest = list(sampler)[skipped * workload.batch_size :]
        yield from DataLoader(dataset, workload.batch_size, sampler=rest, drop_last=True)
        skipped = 0


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Write beside and replace, so that a kill in between leaves the one before."""
    beside = path.with_suffix(".new")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": num_steps}
    torch.save(state, beside)
    os.replace(beside, path)


def noting(args: argparse.Namespace, rank: int) -> Callable[[int], None]:
    """Open the file of times; what is returned appends one step to it."""
    file = open(args.times, "a", buffering=1)  # noqa: SIM115 - until the process ends

    def note(step: int) -> None:
        now_s = time.monotonic()
        file.write(f"{step} {now_s:.6f} {os.getpid()} {rank}\n")
        if now_s > args.until:
            raise SystemExit(0)

    return note


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["unisono", "ddp"])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--times", type=Path, required=True, help="where lines are appended")
    parser.add_argument("--checkpoint", type=Path, required=True, help="of ddp")
    parser.add_argument("--steps", type=int, default=10**6, help="of unisono")
    parser.add_argument("--device", help="of unisono")
    parser.add_argument("--until", type=float, required=True, help="on time.monotonic()")
    args = parser.parse_args()
    if time.monotonic() > args.until:
        raise SystemExit(0)  # an error would have torchrun start it again
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    workload = WORKLOADS[args.workload]
    dataset, _ = workload.load(args.data, 60_000)
    {"unisono": train_unisono, "ddp": train_ddp}[args.way](args, workload, dataset)


if __name__ == "__main__":
    main()
