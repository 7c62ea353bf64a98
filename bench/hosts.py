"""How fast are two hosts on a slow link, and what do they send? ``python -m bench.hosts`` as root.

The hosts are network namespaces of this machine with a shaped link between them, as in
``make test-hosts``. Unisono and torch's DDP over gloo, tuned, train the same model in turns
(A B A B …), so that whatever else the machine does meets both. Bytes are counted at the link. The
last table is of bytes alone, for other numbers of workers a host.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tests.hosts.virtual_hosts import Link, torchrun, virtual_hosts, why_not
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from bench.machine import Others, facts
from bench.workloads import CONTEXT, GPT, NUM_CHARACTERS

SIDES = ("ddp", "ddp-4", "unisono")  # the second in buckets of 4 MB
OF_BYTES = (
    ("gloo's all-reduce, one worker a host", "ring", (1, 1)),
    ("Unisono, two workers a host", "unisono", (2, 2)),
    ("torch's DDP over gloo, two workers a host", "ddp", (2, 2)),
    ("Unisono, one worker and three, which makes two parts", "unisono", (1, 3)),
)
SHARDS = 4
WARM_UP_STEPS = 3
WIDTH = 100  # letters
QUIET_S = 1.0  # before and after the timed steps, while traffic is read
TIMEOUT_S = 300.0


def mlp() -> nn.Module:
    """Little arithmetic for 25 MB of gradients."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def vectors(number: int) -> TensorDataset:
    return TensorDataset(torch.randn(number, 1024), torch.randint(10, (number,)))


def text(number: int) -> TensorDataset:
    tokens = torch.randint(NUM_CHARACTERS, (number, CONTEXT + 1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        build, load: make the model, and so many samples.
        batch_size: samples a worker and step.
        num_steps: under the clock.
    """

    build: Callable[[], nn.Module]
    load: Callable[[int], TensorDataset]
    batch_size: int
    num_steps: int


JOBS = {"mlp": Job(mlp, vectors, 16, 15), "gpt": Job(GPT, text, 4, 10)}


@dataclass(frozen=True)
class Turn:
    """What was seen of one side.

    Attributes:
        step_s: seconds a step.
        busy_s: processor time of rank 0 a step, all its threads together.
        sent: bytes that the host that sent more has sent in a step.
        num_bytes: of the gradients.
    """

    step_s: float
    busy_s: float
    sent: float
    num_bytes: int


def main() -> int:
    args = parse()
    if args.side:
        work(args)
        return 0
    if reason := why_not():
        print(reason)
        return 1
    console, others = Console(width=WIDTH), Others()
    console.print(f"{facts()['cpu']}, load {os.getloadavg()[0]:.1f} when this began")
    for job in filter(None, args.jobs.split(",")):
        compare(console, job, args)
    if args.bytes:
        count_bytes(console, args)
    console.print(f"load {os.getloadavg()[0]:.1f} when this ended. {others}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument(
        "--jobs", default=",".join(JOBS), help='which models (mlp,gpt); "" for bytes alone'
    )
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc has it (1gbit)")
    parser.add_argument("--turns", type=int, default=5, help="of each side (5)")
    parser.add_argument("--no-bytes", dest="bytes", action="store_false", help="no table of bytes")
    parser.add_argument("--side", choices=(*SIDES, "ring"), help=argparse.SUPPRESS)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(console: Console, job: str, args: argparse.Namespace) -> None:
    """Train both ways in turns, two workers a host; print times and what they send."""
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    for number in range(args.turns):
        for side in SIDES:
            turns[side].append(turn := take_turn(side, job, (2, 2), Link(args.rate)))
            console.print(f"{number + 1}/{args.turns} {job} {side} {1000 * turn.step_s:.1f} ms")
    title = f"{job}, {turns['ddp'][0].num_bytes:,} bytes of gradients, {args.rate}, 2 × 2 workers"
    table = Table(title=title, title_justify="left")
    headings = ("", "ms/step", "min … max", "busy", "bytes a host and step", "× faster DDP")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    median_s = {side: statistics.median(one.step_s for one in turns[side]) for side in SIDES}
    fastest_s = min(median_s[side] for side in SIDES[:-1])
    for side, own in turns.items():
        times_ms = [1000 * one.step_s for one in own]
        table.add_row(
            side,
            f"{1000 * median_s[side]:.1f}",
            f"{min(times_ms):.1f} … {max(times_ms):.1f}",
            f"{1000 * statistics.median(one.busy_s for one in own):.1f}",
            f"{statistics.median(one.sent for one in own):,.0f}",
            f"{fastest_s / median_s[side]:.2f}",
        )
    console.print(table)


def count_bytes(console: Console, args: argparse.Namespace) -> None:
    """Print what hosts send in a step of the GPT."""
    seen = [take_turn(side, "gpt", workers, Link(args.rate)) for _, side, workers in OF_BYTES]
    title = f"Bytes that a host sends in a step, gradients of {seen[0].num_bytes:,} bytes"
    table = Table("", "bytes", "of a ring", title=title, title_justify="left")
    for (name, _, _), turn in zip(OF_BYTES, seen, strict=True):
        table.add_row(name, f"{turn.sent:,.0f}", f"{turn.sent / seen[0].sent:.3f}")
    console.print(table)


def take_turn(side: str, job: str, workers: Sequence[int], link: Link) -> Turn:
    """Make two hosts, and train one way."""
    program = ["-m", "bench.hosts", "--side", side, "--job", job]
    with virtual_hosts(2, link) as hosts:
        ranks = torchrun(hosts, workers, program)
        counts, said = [], ""
        try:
            for line in lines_of(ranks[0]):
                said += line
                if line.startswith(("begin", "end")):
                    counts.append([host.sent_bytes() for host in hosts])
                    found = re.search(r"end (\S+) s, (\S+) busy, (\d+) bytes", line)
            for rank in ranks:  # else nobody knows what processor time they took
                rank.communicate(timeout=TIMEOUT_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if len(counts) != 2 or found is None:
            raise RuntimeError(f"{side} has failed: {said}")
        sent = max(last - first for first, last in zip(*counts, strict=True))
        return Turn(float(found[1]), float(found[2]), sent / JOBS[job].num_steps, int(found[3]))


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    while line := process.stdout.readline():
        yield line


def work(args: argparse.Namespace) -> None:
    """Be one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = JOBS[args.job]
    model = job.build()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    clock = Clock(job.num_steps, num_bytes)
    if args.side == "unisono":
        train(job, model, clock)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo")
    if args.side == "ring":
        flat = torch.ones(num_bytes // 4)
        for number in range(clock.num_steps):
            clock.read(number)
            dist.all_reduce(flat)
    else:
        train_ddp(job, model, clock, bucket_mb=25 if args.side == "ddp" else 4)
    dist.barrier()
    dist.destroy_process_group()


class Clock:
    """Times the steps behind the first ones. Final.

    Args:
        timed_steps: how many.
        num_bytes: of the gradients.

    Attributes:
        num_steps: how many to take, one of them behind the timed ones.
    """

    def __init__(self, timed_steps: int, num_bytes: int) -> None:
        self._timed, self._num_bytes = timed_steps, num_bytes
        self._begun_s = self._busy_s = 0.0
        self.num_steps = WARM_UP_STEPS + timed_steps + 1

    def read(self, number: int) -> None:
        """Read the time when a step begins, which none does before the last one is done."""
        is_first = os.environ["RANK"] == "0"
        if number == WARM_UP_STEPS + self._timed:
            step_s = (time.perf_counter() - self._begun_s) / self._timed
            busy_s = (time.process_time() - self._busy_s) / self._timed
            if is_first:
                print(f"end {step_s} s, {busy_s} busy, {self._num_bytes} bytes", flush=True)
        elif number == WARM_UP_STEPS and is_first:
            print("begin", flush=True)
        if number in (WARM_UP_STEPS, WARM_UP_STEPS + self._timed):
            time.sleep(QUIET_S)
        if number == WARM_UP_STEPS:
            self._begun_s, self._busy_s = time.perf_counter(), time.process_time()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def train(job: Job, model: nn.Module, clock: Clock) -> None:
    import unisono

    num_workers = int(os.environ["WORLD_SIZE"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    run = unisono.Run(model, optimizer, shards=SHARDS)
    batch_size = job.batch_size * num_workers
    data = job.load(batch_size * clock.num_steps)
    for number, step in enumerate(run.steps(data, batch_size=batch_size, steps=clock.num_steps)):
        clock.read(number)
        with step:
            for inputs, targets in step.shards:
                step.backward(loss(model(inputs), targets))


def train_ddp(job: Job, model: nn.Module, clock: Clock, bucket_mb: int) -> None:
    network = DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=bucket_mb
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    data = job.load(job.batch_size * clock.num_steps)
    for number in range(clock.num_steps):
        clock.read(number)
        first = number * job.batch_size
        inputs, targets = data[first : first + job.batch_size]
        optimizer.zero_grad()
        loss(network(inputs), targets).backward()
        optimizer.step()


if __name__ == "__main__":
    sys.exit(main())
