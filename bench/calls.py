"""How many Python functions does a step call? ``python -m bench.calls [--against OLDER_PYTHON]``.

A count needs no quiet machine. On two workers it depends on how often one looks before it sleeps:
the middle and the least of all steps are shown. Calls of torch's own modules count, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import TensorDataset

from bench.processes import environment, unisono_run
from bench.workloads import WORKLOADS
from unisono import world
from unisono.callbacks import Callback, Fit

WARMUP_STEPS, COUNTED_STEPS = 40, 101
MARK = "calls "


class Counter(Callback):
    """Counts Python calls from the beginning of a step to that of the next. Final."""

    def __init__(self) -> None:
        self._calls = 0
        self.counts: list[int] = []

    def on_step_begin(self, fit: Fit) -> None:
        if fit.step > WARMUP_STEPS:
            self.counts.append(self._calls)
        self._calls = 0
        sys.setprofile(self._note)

    def _note(self, _frame: FrameType, event: str, _argument: Any) -> None:
        self._calls += event == "call"


def count(workload_name: str, num_shards: int, num_workers: int) -> None:
    """Train in this process or these workers; rank 0 prints its counts."""
    from unisono import Trainer

    workload = WORKLOADS[workload_name]
    torch.manual_seed(0)
    num_steps = WARMUP_STEPS + COUNTED_STEPS + 1
    batch_size = 8 * num_shards
    images = torch.randn(num_steps * batch_size, *SHAPES[workload_name])
    dataset = TensorDataset(images, torch.randint(10, (len(images),)))
    model = workload.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    counter = Counter()
    loss, callbacks = workload.loss, [counter]
    trainer = Trainer(model, optimizer, loss, shards=num_shards, seed=0, callbacks=callbacks)
    trainer.fit(dataset, batch_size=batch_size, steps=num_steps)
    sys.setprofile(None)
    if world().rank == 0:
        print(MARK + json.dumps(counter.counts), flush=True)


SHAPES = {"tiny": (1024,), "cnn8": (1, 28, 28)}
CASES = [
    (workload, shards, workers)
    for workload in SHAPES
    for shards, workers in ((1, 1), (8, 1), (2, 2))
]


def measured(python: str, case: tuple[str, int, int]) -> list[int]:
    """Count in processes of one interpreter's Unisono; calls of each step."""
    workload, shards, workers = case
    start = unisono_run(workers) if python == sys.executable else _run_of(python, workers)
    if workers == 1:
        start = [python]
    program = [str(Path(__file__)), "--count", workload, str(shards), str(workers)]
    done = subprocess.run(
        [*start, *program], env=environment(1), capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"{' '.join([*start, *program])} printed no counts:\n{done.stderr}")
    counts: list[int] = json.loads(lines[0].removeprefix(MARK))
    return counts


def _run_of(python: str, num_workers: int) -> list[str]:
    return [python, "-m", "unisono", "run", "-n", str(num_workers)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__)
    parser.add_argument("--against", metavar="OLDER_PYTHON", help="another version's interpreter")
    parser.add_argument("--count", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count:
        count(args.count[0], int(args.count[1]), int(args.count[2]))
        return
    pythons = [*filter(None, [args.against]), sys.executable]
    print(f"Python calls in a step of rank 0: middle (least) of {COUNTED_STEPS - 1} steps")
    for case in CASES:
        workload, shards, workers = case
        counts = [measured(python, case) for python in pythons]
        words = [f"{statistics.median(each):.0f} ({min(each)})" for each in counts]
        names = ["older ", "newer "] if args.against else [""]
        shown = ", ".join(name + word for name, word in zip(names, words, strict=True))
        print(f"{workload}, {shards} shards, {workers} workers: {shown}")


if __name__ == "__main__":
    main()
