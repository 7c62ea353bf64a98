"""How is it trained? One function per side; this file is also the program each process runs.

The clock starts after the warm-up steps and stops ``timed_steps`` later, on rank 0. Sides of
several processes meet at a barrier before each reading; Unisono's clock is read where a forward
pass begins, which no worker reaches before the step before it is done everywhere.

=================  =========================================================================
plain              one process, the whole global batch, 1 thread
plain-threads      the same with the number of threads that torch chooses
passes             forward and backward alone: a fixed batch, no loading, no optimizer,
                   on as many independent processes at once as there are workers
ddp                torch DDP on gloo the usual way
ddp-tuned          gradients as views of the buckets, static graph, fused optimizer
ddp-shared         the script of ``ddp`` with "unisono" where that says "gloo"
ddp-tuned-shared   the script of ``ddp-tuned`` likewise
ddp-apart          the script of ``ddp-shared`` without any exchange (``no_sync``): how fast it
                   would be if exchanging cost nothing
unisono            shards = workers, the optimizer as in ``ddp``
unisono-fused      shards = workers, the optimizer as in ``ddp-tuned``
unisono-fused-gloo the same with ``UNISONO_EXCHANGE=gloo``: a process group, like ``ddp-tuned``
unisono-fused-staged  the same with ``UNISONO_EXCHANGE=staged``: replicas, through the host's memory
…-events           the same with ``directory=``, so that every step is written to its event file
=================  =========================================================================
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from bench.workloads import WORKLOADS, Workload

SEED = 0
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Task:
    """What one process of a side is to measure."""

    workload: Workload
    dataset: Dataset[Any]
    num_workers: int
    warmup_steps: int
    timed_steps: int
    scratch: Path

    @property
    def global_batch_size(self) -> int:
        return self.workload.batch_size * self.num_workers

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self.workload.build()

    def adam(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.workload.lr, **options)


@dataclass(frozen=True)
class Timing:
    """What the timed steps took.

    Attributes:
        seconds: from the first to the end of the last.
        events_s: of these, in writing the event file on rank 0; None where there is none.
    """

    seconds: float
    events_s: float | None = None


def time_steps(task: Task, step: Callable[[], None], barrier: Callable[[], None]) -> Timing:
    """Take the warm-up steps, then the timed ones."""
    for _ in range(task.warmup_steps):
        step()
    barrier()
    start_s = time.perf_counter()
    for _ in range(task.timed_steps):
        step()
    barrier()
    return Timing(time.perf_counter() - start_s)


def batches(loader: DataLoader[Any]) -> Iterator[list[Tensor]]:
    """Give batches for ever, epoch after epoch."""
    epoch = 0
    while True:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def plain(task: Task) -> Timing:
    model = task.model()
    optimizer = task.adam(model)
    loader = DataLoader(task.dataset, task.global_batch_size, shuffle=True, drop_last=True)
    endless = batches(loader)

    def step() -> None:
        batch = next(endless)
        optimizer.zero_grad()
        task.workload.loss(model, batch).backward()
        optimizer.step()

    return time_steps(task, step, barrier=lambda: None)


def passes(task: Task) -> Timing:
    model = task.model()
    first = dist.get_rank() * task.workload.batch_size
    samples = range(first, first + task.workload.batch_size)
    batch = default_collate([task.dataset[sample] for sample in samples])

    def step() -> None:
        model.zero_grad()
        task.workload.loss(model, batch).backward()

    return time_steps(task, step, dist.barrier)


def ddp(task: Task) -> Timing:
    model = nn.parallel.DistributedDataParallel(task.model())
    return _time_ddp(task, model, task.adam(model))


def ddp_tuned(task: Task) -> Timing:
    model = nn.parallel.DistributedDataParallel(
        task.model(), gradient_as_bucket_view=True, static_graph=True
    )
    return _time_ddp(task, model, task.adam(model, fused=True))


def ddp_apart(task: Task) -> Timing:
    model = nn.parallel.DistributedDataParallel(task.model())
    with model.no_sync():
        return _time_ddp(task, model, task.adam(model))


def _time_ddp(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> Timing:
    sampler: DistributedSampler[Any] = DistributedSampler(task.dataset, seed=SEED, drop_last=True)
    loader = DataLoader(task.dataset, task.workload.batch_size, sampler=sampler, drop_last=True)
    endless = batches(loader)

    def step() -> None:
        batch = next(endless)
        optimizer.zero_grad()
        task.workload.loss(model, batch).backward()
        optimizer.step()

    return time_steps(task, step, dist.barrier)


def unisono(task: Task) -> Timing:
    return _time_unisono(task)


def unisono_fused(task: Task) -> Timing:
    return _time_unisono(task, fused=True)


def unisono_fused_gloo(task: Task) -> Timing:
    return _time_unisono(task, exchange="gloo", fused=True)


def unisono_fused_staged(task: Task) -> Timing:
    return _time_unisono(task, exchange="staged", fused=True)


def unisono_events(task: Task) -> Timing:
    return _time_unisono(task, task.scratch / "run")


def unisono_fused_events(task: Task) -> Timing:
    return _time_unisono(task, task.scratch / "run", fused=True)


def _time_unisono(
    task: Task, directory: Path | None = None, exchange: str = "auto", **options: Any
) -> Timing:
    from unisono import Trainer, world
    from unisono.callbacks import EventLog

    ends_s: list[float] = []
    events_s: list[float] = []  # at the same moments, all that the event file has cost so far

    model = task.model()
    optimizer = task.adam(model, **options)
    events, meter = EventLog(), Meter()
    end = events.on_step_end

    def note_end(fit: Any, step: Any) -> None:
        end(fit, step)
        ends_s.append(time.perf_counter())
        events_s.append(meter.seconds)

    events.on_step_end = note_end  # type: ignore[method-assign]
    os.environ["UNISONO_EXCHANGE"] = exchange
    trainer = Trainer(
        *(model, optimizer, task.workload.loss),
        shards=task.num_workers,
        seed=SEED,
        directory=directory,
        callbacks=[events],
    )
    if directory is not None:
        meter.measure(events, "on_step_end")
        meter.measure(events, "on_snapshot")
        run: Any = trainer.run  # older versions have the team there
        team = run.team if hasattr(run, "team") else run._context.team
        meter.measure(team, "note_times")
    first, last = task.warmup_steps, task.warmup_steps + task.timed_steps
    trainer.fit(task.dataset, batch_size=task.global_batch_size, steps=last + 2)
    if len(ends_s) != last + 2:
        raise RuntimeError(f"expected the ends of {last + 2} steps, saw {len(ends_s)}")
    seconds = ends_s[last] - ends_s[first]
    if directory is None:
        return Timing(seconds)
    if world().rank == 0:
        num_lines = (directory / "events.jsonl").read_text().count('{"event":"step"')
        if num_lines != last + 2:
            raise RuntimeError(f"expected {last + 2} steps in the event file, saw {num_lines}")
    return Timing(seconds, events_s[last] - events_s[first])


class Meter:
    """Adds up the time that is spent in some methods. Final."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measure(self, owner: Any, name: str) -> None:
        """Count the time of a method of this one object from now on."""
        method = getattr(owner, name)

        def measured(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            result = method(*arguments)
            self.seconds += time.perf_counter() - start_s
            return result

        setattr(owner, name, measured)


@dataclass(frozen=True)
class Side:
    """A way to train, and how its processes come about."""

    title: str
    measure: Callable[[Task], Timing]
    started_by: str  # "one process", "a process group" or "unisono run"
    threads: int | None = 1  # None: as many as torch chooses
    backend: str = "gloo"  # of the process group


SIDES = {
    "plain": Side("one process, 1 thread, global batch", plain, "one process"),
    "plain-threads": Side("one process, all threads, global batch", plain, "one process", None),
    "passes": Side("forward + backward alone, all at once", passes, "a process group"),
    "ddp": Side("torch DDP, usual", ddp, "a process group"),
    "ddp-tuned": Side("torch DDP, tuned", ddp_tuned, "a process group"),
    "ddp-shared": Side(
        'the same but for "gloo" → "unisono"', ddp, "a process group", backend="unisono"
    ),
    "ddp-tuned-shared": Side(
        'tuned, "gloo" → "unisono"', ddp_tuned, "a process group", backend="unisono"
    ),
    "ddp-apart": Side(
        'the same, "unisono", never exchanging', ddp_apart, "a process group", backend="unisono"
    ),
    "unisono": Side("Unisono, optimizer as usual", unisono, "unisono run"),
    "unisono-alone": Side("Unisono, `python train.py`", unisono, "one process"),
    "unisono-events": Side("Unisono, event file on", unisono_events, "unisono run"),
    "unisono-fused": Side("Unisono, fused optimizer as tuned", unisono_fused, "unisono run"),
    "unisono-fused-gloo": Side("Unisono on gloo, fused", unisono_fused_gloo, "unisono run"),
    "unisono-fused-staged": Side("Unisono, staged, fused", unisono_fused_staged, "unisono run"),
    "unisono-fused-events": Side(
        "Unisono, fused, event file on", unisono_fused_events, "unisono run"
    ),
}


def main() -> None:
    """Measure one side in this process; rank 0 writes what it saw as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--timed-steps", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="a folder of its own")
    args = parser.parse_args()
    side, workload = SIDES[args.side], WORKLOADS[args.workload]
    if side.threads is not None:
        torch.set_num_threads(side.threads)

    torch.manual_seed(SEED)  # every process draws the same stand-in data
    num_steps = args.warmup_steps + args.timed_steps + 2
    dataset, is_real = workload.load(args.data, num_steps * workload.batch_size * args.workers)
    task = Task(workload, dataset, args.workers, args.warmup_steps, args.timed_steps, args.scratch)
    rank = int(os.environ.get("RANK", "0"))
    if side.started_by == "a process group":
        store = dist.FileStore(str(args.scratch / "store"), args.workers)
        import unisono  # noqa: F401  (makes the backend known)

        dist.init_process_group(
            side.backend, store=store, rank=rank, world_size=args.workers, timeout=TIMEOUT
        )
    timing = side.measure(task)
    if rank == 0:
        result = {
            **asdict(timing),
            "threads": torch.get_num_threads(),
            "data": "real" if is_real else "random",
        }
        args.out.write_text(json.dumps(result))
    if side.started_by == "a process group":
        leave_group()


def leave_group() -> None:
    """End at once: gloo's threads now and then abort a process that is already done."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
