"""What `bench.forecast` forecasts and then measures: ``forecast_program.py WORKLOAD …``"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import unisono
from bench.workloads import DATA, GPT, cnn, load_mnist, load_text, load_vectors

SHARDS = 4
WARM_UP_STEPS = 5
ENDLESS = 10**9
TOLD = "a step took "
_INTERFACE = "eth0"  # of hosts that are namespaces
# What a link lets through at once after it was idle, which a real one does not: some ms at most.
_BURSTS = {"0.1gbit": "32kb", "1gbit": "80kb", "10gbit": "256kb"}


@dataclass(frozen=True)
class Case:
    """A model, its data, and the samples of a step."""

    build: Callable[[], nn.Module]
    load: Callable[[Path, int], tuple[Dataset[Any], bool]]
    batch_size: int


def wide() -> nn.Module:
    """Much to send and to update for little arithmetic: 4.2 million parameters."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


CASES = {
    "cnn": Case(cnn, load_mnist, 128),
    "gpt": Case(partial(GPT, dim=128, num_layers=4, num_heads=4), load_text, 16),
    "mlp": Case(wide, load_vectors, 128),
}


def main() -> None:
    """Train; rank 0 prints what a step of each block has taken in the mean, in seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=CASES)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--blocks", default=str(ENDLESS), help="numbers of timed steps")
    parser.add_argument(
        "--rates", default="", help=f"of this host's link in each block: {','.join(_BURSTS)}"
    )
    args = parser.parse_args()
    blocks = [int(number) for number in args.blocks.split(",")]
    rates = args.rates.split(",") if args.rates else [""] * len(blocks)
    torch.manual_seed(0)
    case = CASES[args.workload]
    model, (dataset, _) = case.build(), case.load(args.data, 100 * case.batch_size)
    run = unisono.Run(model, torch.optim.Adam(model.parameters(), lr=1e-4), shards=SHARDS)
    num_steps = sum(blocks) + WARM_UP_STEPS * len(blocks)
    steps = iter(run.steps(dataset, batch_size=case.batch_size, steps=num_steps))

    def take(number: int) -> float:
        begun_s = time.perf_counter()
        for _, step in zip(range(number), steps, strict=False):
            with step:
                for inputs, targets in step.shards:
                    outputs = model(inputs).flatten(0, -2)
                    step.backward(F.cross_entropy(outputs, targets.flatten()))
        return (time.perf_counter() - begun_s) / number

    times_s = []
    for rate, number in zip(rates, blocks, strict=True):
        if rate:
            shape(rate)
        take(WARM_UP_STEPS)
        times_s.append(take(number))
    for _ in steps:
        raise AssertionError("all steps were taken")
    if run.world.rank == 0:
        print(TOLD + json.dumps(times_s), flush=True)


def shape(rate: str) -> None:
    """Give this host's link another bandwidth."""
    limits = ["tbf", "rate", rate, "burst", _BURSTS[rate], "latency", "200ms"]
    command = ["tc", "qdisc", "replace", "dev", _INTERFACE, "root", *limits]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
