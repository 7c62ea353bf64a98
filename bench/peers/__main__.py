"""Compare Unisono with Accelerate, Lightning Fabric and Lightning: ``python -m bench.peers``.

All train the MNIST network at batch 8 per worker from a tensor dataset on the CPU, with Adam as
usual, each as its own documentation begins. The sides take turns, as in ``bench``. It runs in an
environment of its own, which ``make bench-peers`` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.processes import REPOSITORY, SideFailedError, environment, measure, run_together
from bench.sides import SIDES
from bench.table import print_failure, print_repeat, print_verdicts
from bench.targets import Repeat, Verdict, median_rates
from bench.workloads import DATA, WORKLOADS

WORKLOAD = "cnn8"
PEERS = {
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "lightning": "Lightning",
}
PACKAGES = "accelerate", "lightning"
DDP, OURS, OURS_FUSED = "ddp", "unisono-events", "unisono-fused-events"
NAMES = [DDP, *PEERS, OURS, OURS_FUSED]
TITLES = PEERS | {side: SIDES[side].title for side in (DDP, OURS, OURS_FUSED)}
AT_LEAST = 2.0
WARMUP_STEPS, TIMED_STEPS = 50, 400
QUICK_STEPS = 10
TIMEOUT_S = 120.0  # of one side once


def main() -> int:
    """Measure, print, write; the exit status is 1 if a side could not be measured."""
    args = parse()
    console = Console(width=None if os.isatty(1) else 130)
    facts, others = machine.facts(), machine.Others()
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}", highlight=False
    )
    repeats, failures = measure_in_turn(console, args)
    if repeats:
        print_rates(console, repeats)
    verdicts = verdicts_of(repeats)
    print_verdicts(console, verdicts)
    if args.quick:
        console.print("A quick run shows that every side works; its figures mean little.")
    console.print(str(others), highlight=False, soft_wrap=True)
    facts["others_cores"] = others.cores()
    folder = REPOSITORY / "bench" / "results"
    path = args.json or folder / f"{datetime.now():%Y-%m-%d-%H%M%S}-peers.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": facts | {"peers": {peer: machine.version(peer) for peer in PACKAGES}},
        "workers": args.workers,
        "is_quick": args.quick,
        "targets": [verdict.as_json() for verdict in verdicts],
        "repeats": [repeat.as_json() for repeat in repeats],
        "failures": list(failures.values()),
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"All repeats are in {path}", highlight=False, soft_wrap=True)
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--sides", default=",".join(NAMES), help=f"some of {','.join(NAMES)}")
    parser.add_argument("--repeats", type=int, default=3, help="of each side (3; quick: 1)")
    parser.add_argument("--workers", type=int, default=2, help="of each side (2)")
    parser.add_argument("--steps", type=int, default=TIMED_STEPS, help="under the clock (400)")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with mnist/")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where all repeats are written")
    args = parser.parse_args()
    args.sides = args.sides.split(",")
    for name in args.sides:
        if name not in NAMES:
            parser.error(f"{name!r} is not one of {', '.join(NAMES)}")
    if args.quick:
        args.repeats = 1
    return args


def measure_in_turn(
    console: Console, args: argparse.Namespace
) -> tuple[list[Repeat], dict[str, str]]:
    """Measure each side in turn; a side that fails once is left out and reported."""
    warmup_steps, timed_steps = WARMUP_STEPS, args.steps
    if args.quick:
        warmup_steps = timed_steps = QUICK_STEPS
    num_samples = timed_steps * WORKLOADS[WORKLOAD].batch_size * args.workers
    repeats: list[Repeat] = []
    failures: dict[str, str] = {}
    for repeat in range(args.repeats):
        for side in (side for side in args.sides if side not in failures):
            how: dict[str, Any] = {
                "num_workers": args.workers,
                "warmup_steps": warmup_steps,
                "timed_steps": timed_steps,
                "data": args.data.resolve(),
            }
            try:
                seen = (
                    measure_peer(side, **how)
                    if side in PEERS
                    else measure(side, WORKLOAD, timeout_s=TIMEOUT_S, **how)
                )
            except SideFailedError as error:
                failures[side] = f"{side}: {error}"
                print_failure(console, failures[side])
                continue
            repeats.append(Repeat(WORKLOAD, side, repeat, timed_steps, num_samples, **seen))
            print_repeat(console, repeats[-1], args.repeats)
    return repeats, failures


def measure_peer(
    side: str, *, num_workers: int, warmup_steps: int, timed_steps: int, data: Path
) -> dict[str, Any]:
    """Measure one peer once, under torchrun, which all of them name as a launcher.

    Raises:
        SideFailedError: it ended with an error, or not in time, or had another number of workers.
    """
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        out = Path(folder, "result.json")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr", "127.0.0.1", "--nproc-per-node", str(num_workers)),
            str(REPOSITORY / "bench" / "peers" / f"{side}_mnist.py"),
            *("--warmup-steps", str(warmup_steps), "--timed-steps", str(timed_steps)),
            *("--data", str(data), "--out", str(out), "--limit-s", str(TIMEOUT_S)),
        ]
        # torchrun leaves folders in the one for temporary files, unless that goes away with them.
        env = environment(1, GLOO_SOCKET_IFNAME="lo", TMPDIR=folder)
        run_together([(command, env)], Path(folder), TIMEOUT_S)
        if not out.is_file():
            raise SideFailedError("rank 0 ended without a result")
        seen: dict[str, Any] = json.loads(out.read_text())
    if seen.pop("workers") != num_workers:
        raise SideFailedError(f"must train on {num_workers} workers, but did not")
    return seen


def verdicts_of(repeats: list[Repeat]) -> list[Verdict]:
    """Judge Unisono against each peer that was measured, both with Adam as usual and fused."""
    rates = median_rates(repeats, WORKLOAD)
    verdicts = []
    for peer, title in PEERS.items():
        for ours in (OURS, OURS_FUSED):
            if peer in rates and ours in rates:
                seen = rates[ours] / rates[peer]
                promise = f"MNIST CNN, batch 8 per worker: {TITLES[ours]} ≥ {AT_LEAST} × {title}"
                verdicts.append(Verdict(promise, seen, seen >= AT_LEAST))
    return verdicts


def print_rates(console: Console, repeats: list[Repeat]) -> None:
    """Print medians with their range, and Unisono's rate over each side's."""
    rates = median_rates(repeats, WORKLOAD)
    data = "real data" if repeats[0].data == "real" else "random data of the same shape"
    table = Table(title=f"{WORKLOADS[WORKLOAD].title} ({data})", title_justify="left")
    table.add_column("side", no_wrap=True)
    for heading in ("ms/step", "min … max", "samples/s", "Unisono ×", "Unisono, fused ×"):
        table.add_column(heading, justify="right", no_wrap=True)
    for side in (name for name in NAMES if name in rates):
        times_ms = [own.ms_per_step for own in repeats if own.side == side]
        over = [
            f"{rates[ours] / rates[side]:.2f}" if ours in rates else "–"
            for ours in (OURS, OURS_FUSED)
        ]
        table.add_row(
            TITLES[side],
            f"{statistics.median(times_ms):.2f}",
            f"{min(times_ms):.2f} … {max(times_ms):.2f}",
            f"{rates[side]:,.0f}",
            *over,
        )
    console.print(table)


if __name__ == "__main__":
    # As an exception, so that whoever started processes ends them.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    raise SystemExit(main())
